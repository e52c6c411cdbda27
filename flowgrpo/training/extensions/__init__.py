"""Extensions: features that only some runs need. Each is a class with hooks that the training loop calls."""

from .coherence import Coherence
from .contrast import Contrast
from .curriculum import Curriculum
from .difficulty import Difficulty
from .exploration import Exploration
from .extension import Extension
from .extension import Rewards as Rewards
from .guard import Guard
from .judges import Judges
from .meta_judge import MetaJudge
from .multipliers import ConstraintMultipliers
from .novelty import Novelty
from .pacing import Pacing
from .past_groups import PastGroups
from .replay import Replay
from .shaping import Shaping
from .shuffle import Shuffle
from .suspects import Suspects
from .teacher import Teacher
from .tightening import Tightening
from .uncertainty import Uncertainty
from .variants import Variants
from .visits import Visits

EXTENSIONS: dict[str, type[Extension]] = {
    "curriculum": Curriculum,
    "multipliers": ConstraintMultipliers,
    "shaping": Shaping,
    "uncertainty": Uncertainty,
    "replay": Replay,
    "visits": Visits,
    "contrast": Contrast,
    "coherence": Coherence,
    "difficulty": Difficulty,
    "exploration": Exploration,
    "teacher": Teacher,
    "variants": Variants,
    "pacing": Pacing,
    "guard": Guard,
    "judges": Judges,
    "meta_judge": MetaJudge,
    "past_groups": PastGroups,
    "suspects": Suspects,
    "novelty": Novelty,
    "tightening": Tightening,
    "shuffle": Shuffle,
}
"""The extensions of the package, by their names in recipes."""
