"""Extensions: features that only some runs need. Each is a class with hooks that the training loop calls."""

from .coherence import Coherence
from .contrast import Contrast
from .curriculum import Curriculum
from .extension import Extension
from .guard import Guard
from .multipliers import ConstraintMultipliers
from .pacing import Pacing
from .replay import Replay
from .reward_schedule import RewardSchedule
from .shaping import Shaping
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
    "schedule": RewardSchedule,
    "contrast": Contrast,
    "coherence": Coherence,
    "variants": Variants,
    "pacing": Pacing,
    "guard": Guard,
}
"""The extensions of the package, by their names in recipes."""
