"""From scores to advantages: everything between the rewards and the loss.

Read the files in this order. An iteration runs through them in the same order:

1. `pooling.py`: the samples of all processes together.
2. `combining.py`: corrections, gates, and how several rewards become one.
3. `comparing.py`: how a sample compares with other samples. `remembering.py` also compares with earlier iterations.
   `strata.py` says which samples are alike.
4. `credits.py`: the advantage of every step or token. `step_credits.py` has the credits of images, and
   `token_credits.py` the credits of completions. `form_credits.py` has the credits that need a form of the rollout.
   `conditions.py` says what credits need from a recipe.
5. `selecting.py`: which samples enter the gradient.
6. `from_scores.py`: all of these in a row, as the trainer calls them.
"""
