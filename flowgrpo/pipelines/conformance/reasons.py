"""Why a pipeline class does not work: its `__call__` cannot be replayed, or it takes no prompt."""

from __future__ import annotations

_CHUNKS = "denoises its video chunk after chunk, and each chunk sees the chunks before it: several chains of states"
_TILES = "denoises tile after tile, each from its own noise: several chains of states"
_FRAME_LEVELS = "each frame has its own noise level"
_NO_FLOW = "an EDM model whose pipeline calls its scheduler twice at each step, first for a clean prediction"
_WITH_SOUND = "has two states, picture and sound, and takes two steps at each noise level"
_SOUND = "takes a given sound beside its prompt, and a prompt here has pictures only"
_ITS_TRANSFORMER = "its own call fails: it reads a field that is missing in its transformer's configuration"
_EDITED = "encodes its prompt and its picture by a method of its own, so encoded prompts cannot be kept"

# What prevents a replay of a class. The checks found it, or it was found by reading the class's `__call__`.
REASONS: dict[str, str] = {
    "CosmosTextToWorldPipeline": _NO_FLOW,
    "CosmosVideoToWorldPipeline": _NO_FLOW,
    "ChromaInpaintPipeline": _ITS_TRANSFORMER,
    "EasyAnimateControlPipeline": "its own call fails: it passes an argument that its `encode_prompt` does not take",
    "JoyImageEditPipeline": _EDITED,
    "JoyImageEditPlusPipeline": _EDITED,
    "QwenImageLayeredPipeline": "makes several layers for a prompt, and a reward here scores one picture",
    "VisualClozeGenerationPipeline": "takes a task, a content and a grid of example pictures in place of a prompt",
    "SanaSprintPipeline": "TrigFlow: its time is an angle, and its step returns two states; it needs its own kernel",
    "SanaSprintImg2ImgPipeline": "TrigFlow, like SanaSprintPipeline",
    "LTX2DFRPipeline": f"{_WITH_SOUND}; between its steps, it pastes in the conditions",
    "LTX2DFRTemporalRefinePipeline": f"{_WITH_SOUND}, tile after tile, from the latents of another pipeline",
    "LTX2HDRPipeline": "takes two steps at each noise level; one of them denoises a sound that stays noise",
    "LTX2VideoDiffusionDecodePipeline": "has no prompt and no noise levels of its own: it decodes latents",
    "LTXI2VLongMultiPromptPipeline": "denoises overlapping windows of its video in turn: several chains of states",
    "Cosmos2_5_TransferPipeline": f"{_CHUNKS}; it also takes a control video",
    "WanAnimatePipeline": f"{_CHUNKS}; it also takes videos of the pose and the face",
    "HunyuanVideoFramepackPipeline": _CHUNKS,
    "Kandinsky6SRPipeline": f"has no prompt: it enlarges a video, and {_TILES}",
    "SanaWMPipeline": "its first frame stays unchanged, so each token has its own noise level",
    "VisualClozePipeline": "runs two pipelines; the second denoises what the first decoded",
    "SkyReelsV2DiffusionForcingPipeline": _FRAME_LEVELS,
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": _FRAME_LEVELS,
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": _FRAME_LEVELS,
    "AnyFlowPipeline": "is a flow map: its prediction also depends on the next noise level; and it permutes what "
    "`prepare_latents` drew, so that no way of evaluation fits its state",
    "AnyFlowFARPipeline": _CHUNKS,
    "HeliosPipeline": _CHUNKS,
    "HeliosPyramidPipeline": f"{_CHUNKS}, at several resolutions",
    "GlmImagePipeline": "draws its prior tokens from the global random state in each call, in an order that depends on "
    "the batch",
    "StableAudio3AudioToAudioPipeline": _SOUND,
    "StableAudio3InpaintPipeline": _SOUND,
}


def reason(name: str) -> str:
    """Why a class is not in the table of classes that work; `nobody has tried it` if nothing is known."""
    return REASONS.get(name, "nobody has tried it")
