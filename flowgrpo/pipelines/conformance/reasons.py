"""Why a pipeline class is not in the table: what its `__call__` does that a replay cannot, or what it asks for."""

from __future__ import annotations

_EDITS = "between its steps it pastes the known part of the picture in, which a rollout does not"
_CHUNKS = "makes its video chunk after chunk, each denoised with those before it in view: several chains of states"
_TILES = "tile after tile is denoised from noise of its own: several chains of states"
_FRAME_LEVELS = "a noise level of its own for each frame"
_NO_FLOW = "its noise levels go up to 80 (EDM), where the kernels of flow matching do not hold"
_WITH_SOUND = "two states, picture and sound, and two steps at each noise level"
_SOUND = "makes sound alone, which no reward here takes"
_ITS_TRANSFORMER = "its own call fails: it reads a field that its transformer's configuration lacks"

# What keeps a class from being replayed; found by the checks, or by reading its `__call__`.
REASONS: dict[str, str] = {
    "CosmosTextToWorldPipeline": _NO_FLOW,
    "CosmosVideoToWorldPipeline": _NO_FLOW,
    "Cosmos2TextToImagePipeline": _NO_FLOW,
    "Cosmos2VideoToWorldPipeline": _NO_FLOW,
    "FluxInpaintPipeline": _EDITS,
    "FluxKontextInpaintPipeline": _EDITS,
    "FluxControlInpaintPipeline": _EDITS,
    "FluxControlNetInpaintPipeline": _EDITS,
    "Flux2KleinInpaintPipeline": _EDITS,
    "StableDiffusion3InpaintPipeline": _EDITS,
    "QwenImageInpaintPipeline": _EDITS,
    "QwenImageEditInpaintPipeline": _EDITS,
    "ZImageInpaintPipeline": _EDITS,
    "ChromaInpaintPipeline": _ITS_TRANSFORMER,
    "SanaSprintPipeline": "TrigFlow: its time is an angle, and its step returns two states; needs a kernel of its own",
    "SanaSprintImg2ImgPipeline": "TrigFlow, as SanaSprintPipeline",
    "LTX2Pipeline": _WITH_SOUND,
    "LTX2ImageToVideoPipeline": _WITH_SOUND,
    "LTX2ConditionPipeline": _WITH_SOUND,
    "LTX2InContextPipeline": _WITH_SOUND,
    "LTX2DFRPipeline": f"{_WITH_SOUND}; conditions are pasted in between its steps",
    "LTX2DFRTemporalRefinePipeline": f"{_WITH_SOUND}, tile after tile, from the latents of another pipeline",
    "LTX2HDRPipeline": "takes two steps at each noise level, one of them of a sound that stays noise",
    "LTX2VideoDiffusionDecodePipeline": "has no prompt and no noise levels of its own: it decodes latents",
    "LTXI2VLongMultiPromptPipeline": "denoises overlapping windows of its video in turn: several chains of states",
    "Cosmos2_5_TransferPipeline": f"{_CHUNKS}; with a video that controls it",
    "WanAnimatePipeline": f"{_CHUNKS}; with videos of the pose and the face",
    "HunyuanVideoFramepackPipeline": _CHUNKS,
    "Kandinsky6SRPipeline": f"has no prompt: it enlarges a video, and {_TILES}",
    "SanaWMPipeline": "its first frame stays as it is: a noise level of its own for each token",
    "VisualClozePipeline": "two pipelines in turn, of which the second denoises what the first decoded",
    "SkyReelsV2DiffusionForcingPipeline": _FRAME_LEVELS,
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": _FRAME_LEVELS,
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": _FRAME_LEVELS,
    "AnyFlowPipeline": "a flow map, whose prediction depends on the noise level it steps to; and it turns what "
    "`prepare_latents` drew, so that no way of evaluating fits its state",
    "AnyFlowFARPipeline": _CHUNKS,
    "HeliosPipeline": _CHUNKS,
    "HeliosPyramidPipeline": f"{_CHUNKS}, at several resolutions",
    "GlmImagePipeline": "draws its prior tokens from the global random state in each call, in an order that depends on "
    "the batch",
    "AceStepPipeline": _SOUND,
    "LongCatAudioDiTPipeline": _SOUND,
    "StableAudio3Pipeline": _SOUND,
    "StableAudio3AudioToAudioPipeline": _SOUND,
    "StableAudio3InpaintPipeline": _SOUND,
}

_TO_EDIT = "edits a picture"
_CONTROLLED = "takes a control image"
_FIRST_FRAME = "makes a video of a picture"

# What a class that nobody has tried asks for beside a prompt. Nothing in its `__call__` is known to be in the way.
UNTRIED: dict[str, str] = {
    "BriaFiboEditPipeline": f"{_TO_EDIT}, with a mask where one is given",
    "Kandinsky5I2IPipeline": _TO_EDIT,
    "JoyImageEditPipeline": _TO_EDIT,
    "JoyImageEditPlusPipeline": "edits several pictures",
    "ChronoEditPipeline": f"{_TO_EDIT}, as the last frame of a video; no temporal reasoning, which drops frames midway",
    "LucyEditPipeline": "edits a video",
    "QwenImageLayeredPipeline": "takes a picture apart into layers",
    "StableDiffusion3PAGImg2ImgPipeline": f"{_TO_EDIT}, at strength 1",
    "VisualClozeGenerationPipeline": "takes a grid of example pictures and two texts",
    "HunyuanImageRefinerPipeline": "refines a picture",
    "FluxControlImg2ImgPipeline": f"{_CONTROLLED} and a picture, at strength 1",
    "FluxControlNetImg2ImgPipeline": f"{_CONTROLLED} and a picture, at strength 1",
    "SanaControlNetPipeline": _CONTROLLED,
    "ZImageControlNetPipeline": _CONTROLLED,
    "ZImageControlNetInpaintPipeline": f"{_CONTROLLED}, a picture and a mask",
    "QwenImageControlNetInpaintPipeline": f"{_CONTROLLED} and a mask",
    "StableDiffusion3ControlNetInpaintingPipeline": f"{_CONTROLLED} and a mask",
    "EasyAnimateControlPipeline": "takes a video that controls it",
    "EasyAnimateInpaintPipeline": "takes a video and a mask, and pastes the known part in between its steps unless its "
    "transformer takes the mask as channels",
    "HunyuanVideoImageToVideoPipeline": f"{_FIRST_FRAME}, which is its first latent frame or further channels",
    "HunyuanSkyreelsImageToVideoPipeline": _FIRST_FRAME,
    "MotifVideoImage2VideoPipeline": _FIRST_FRAME,
    "SanaImageToVideoPipeline": f"{_FIRST_FRAME}, and steps all latent frames but the first",
    "Cosmos3OmniPipeline": "takes one prompt, whose tokens go into the transformer itself; sound and action are "
    "states of their own, and without them one state is left",
}


def reason(name: str) -> str:
    """Why a class is not in the table of what works; `nobody has tried it` where no more is known."""
    if name in UNTRIED:
        return f"{UNTRIED[name]}; nobody has tried it"
    return REASONS.get(name, "nobody has tried it")
