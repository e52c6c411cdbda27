"""From scores to advantages: everything between the rewards and the loss.

Read the files in this order, which is that of an iteration:

1. `pooling.py`: the samples of all processes together.
2. `combining.py`: corrections, gates, and how several rewards become one.
3. `comparing.py`: how a sample compares with others; `remembering.py` compares with earlier iterations too, and
   `strata.py` says which samples are alike.
4. `credits.py`: the advantage of every step or token; `step_credits.py` of images, `token_credits.py` of completions,
   `conditions.py` what credits need of a recipe.
5. `selecting.py`: which samples enter the gradient.
6. `from_scores.py`: all of it in a row, as the trainer calls it.
"""
