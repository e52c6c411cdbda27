"""Repositories and commits that are asked."""

FLOW_GRPO = ("yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd")
# With GRPO-Guard, Flow-CPS and the script for Wan.
NEWER_FLOW_GRPO = ("yifan123/flow_grpo", "9745241cf1101407e9b518dd4f10498092150522")
FLOW_CPS = ("IamCreateAI/FlowCPS", "b402c7a3d5b2539e6c42fed6c6c042bab9a1be05")
DANCE_GRPO = ("XueZeyue/DanceGRPO", "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344")
MIXGRPO = ("Tencent-Hunyuan/MixGRPO", "e5cdd6a427778d8c8b2e7a48ce16972141adbe7c")
BRANCHGRPO = ("Fredreic1849/BranchGRPO", "19fbb9fc92ad1857212f3b664d6e9ff80c8b3804")
TP_GRPO = ("YunzeTong/TurningPoint-GRPO", "994d26a63b65dbeba3260286317c137453cf3070")
SAGE_GRPO = ("Tencent-Hunyuan/SAGE-GRPO", "c86886938386c4ae521cb08ac3d9f34928fbb7ae")
G2RPO = ("bcmi/Granular-GRPO", "0e6979913d4d21dff3bd302f2bb5bfbfcc3f53b5")
FLOW_DPPO = ("Tencent-Hunyuan/UniRL", "1a7b501e8fe8517b432a130220d2ff462f9b5afa")
EUPHONIUM = ("zerzerzerz/Euphonium", "d9f2c39dfa73f5f8ff88de52e68bb65a21b12dee")
NEIGHBOURS = ("UGVly/DrPO", "dd473d8fc28ffe4fb8d0440ad249164e21a23cb0")
NFT = ("NVlabs/DiffusionNFT", "24af5554898d85e93efa492f42b5e9cdf4156e9b")
AWM = ("scxue/advantage_weighted_matching", "be5137232e33a21b449ed65a533211d0deb97ed8")
DGPO = ("Luo-Yihong/DGPO", "01ceb4b83c0bbc55d96246fe1b6d9a3d4749ebd6")
FLOW_FACTORY = ("X-GenGroup/Flow-Factory", "a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c")
PREF_GRPO = ("CodeGoat24/Pref-GRPO", "3e787f6dd5a3051b40d61f07e9578468ac26130a")
# NVIDIA's copy of the code that LLaDA and Dream bring with their weights; it adds caches.
FAST_DLLM = ("NVlabs/Fast-dLLM", "24cc59e75f20a6384bae8c905965bb090b96388e")
# A copy of the code that LLaDA-MoE brings with its weights.
DLLM = ("ZHZisZZ/dllm", "ca176752fbceec49c6b4777a2c18ae88e4eb10ed")
MMADA = ("Gen-Verse/MMaDA", "3cdb8709635beb29f66e4e23cd66060872ac3996")
# The code of TraceRL, with a copy of the code that SDAR and TraDo bring with their weights.
DLLM_RL = ("Gen-Verse/dLLM-RL", "10b4fd1cba83e4496c20585dc2fd01dc02f20255")
SPG = ("facebookresearch/SPG", "a1c712091aee3fde759bbf73b7850546265cd52d")
SDAR = ("JetAstra/SDAR", "c2041a8333333d685f6e15122c84f60f51f85ebd")
STABLE_RL = ("sail-sg/Stable-RL", "c6af1d119c0fe30d16dd9a837d35fdf695acd226")
TRL = ("huggingface/trl", "f2cd57710ae345ea6428ae95363267fcf38a3dc8")
VERL_OMNI = ("verl-project/verl-omni", "a1139bafffb5b9711f0a6b6edff8ecaa60bfff30")
