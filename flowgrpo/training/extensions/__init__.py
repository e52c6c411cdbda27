"""Extensions: features that only some runs need. Each is a class with hooks that the training loop calls."""

from .curriculum import Curriculum
from .extension import Extension
from .guard import Guard
from .multipliers import ConstraintMultipliers
from .past_groups import PastGroups
from .replay import Replay
from .shaping import Shaping
from .tightening import Tightening
from .uncertainty import Uncertainty
from .visits import Visits

EXTENSIONS: dict[str, type[Extension]] = {
    "curriculum": Curriculum,
    "multipliers": ConstraintMultipliers,
    "shaping": Shaping,
    "uncertainty": Uncertainty,
    "replay": Replay,
    "visits": Visits,
    "guard": Guard,
    "past_groups": PastGroups,
    "tightening": Tightening,
}
"""The extensions of the package, by their names in recipes."""
