"""What only some runs want: each a class whose hooks are called at the same few places of every run."""

from .curriculum import Curriculum
from .extension import Extension
from .guard import Guard
from .multipliers import ConstraintMultipliers
from .replay import Replay
from .shaping import Shaping
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
}
"""Those of the package, by the name that a recipe chooses them by."""
