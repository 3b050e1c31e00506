"""The architectures of the sweep: name -> row. A class that the installed Transformers lacks skips its row."""

from __future__ import annotations

from typing import Any

from .architectures import (
    ENCODER_DECODER,
    GPT,
    GROUPED,
    HEADED,
    IMAGE,
    MOE,
    SIZES,
    SPECIAL,
    SPEECH,
    STATE,
    T5,
    VOCAB,
    Architecture,
    audio,
    captioned,
    described,
    image,
    large_image,
    pair,
    plain,
    prefixed,
    prefixed_large,
    right,
    sound,
    spoken,
    text,
    with_image,
    with_patches,
    with_pictures,
)

ENCODER = "an encoder"
NO_TEXT = "no text output"


def causal(stem: str, settings: Any, inputs: Any = text, silent: str = "", **more: Any) -> Architecture:
    return Architecture(f"{stem}Config", f"{stem}ForCausalLM", settings, inputs, silent, **more)


def seq2seq(stem: str, settings: Any, inputs: Any = pair, silent: str = "", **more: Any) -> Architecture:
    return Architecture(f"{stem}Config", f"{stem}ForConditionalGeneration", settings, inputs, silent, **more)


def encoder(stem: str, settings: Any, head: str = "ForSequenceClassification", **more: Any) -> Architecture:
    return Architecture(f"{stem}Config", f"{stem}{head}", settings, right, ENCODER, **more)


def vision(stem: str, settings: Any, head: str = "ForImageClassification", inputs: Any = image) -> Architecture:
    return Architecture(f"{stem}Config", f"{stem}{head}", settings, inputs, NO_TEXT)


# fmt: off
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
DECODERS = {
    "llama": causal("Llama", GROUPED),
    "llama-tied": causal("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": causal("Mistral", {**HEADED, "sliding_window": 4}),
    "qwen2": causal("Qwen2", GROUPED),
    "qwen3": causal("Qwen3", HEADED),
    "gemma2": causal("Gemma2", HEADED),
    "gemma3": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", HEADED, text),
    "phi": causal("Phi", SIZES),
    "phi3": causal("Phi3", GROUPED),
    "glm4": causal("Glm4", HEADED),
    "granite": causal("Granite", GROUPED),
    "olmo2": causal("Olmo2", GROUPED),
    "cohere": causal("Cohere", GROUPED),
    "starcoder2": causal("Starcoder2", GROUPED),
    "stablelm": causal("StableLm", GROUPED),
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", GPT, text),
    "gpt_neo": causal("GPTNeo", {**SIZES, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"],
        1]], "window_size": 4}),
    "gpt_neox": causal("GPTNeoX", SIZES),
    "gptj": causal("GPTJ", {**GPT, "rotary_dim": 4}),
    "gpt_bigcode": causal("GPTBigCode", GPT),
    "codegen": causal("CodeGen", {**GPT, "n_head": 4, "rotary_dim": 4}),
    "mpt": causal("Mpt", {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64,
        **SPECIAL}),
    "bloom": causal("Bloom", {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 2, **SPECIAL}),
    "falcon": causal("Falcon", SIZES),
    "falcon-alibi": causal("Falcon", {**SIZES, "alibi": True, "multi_query": False}),
    "opt": causal("OPT", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 12}),
    "biogpt": causal("BioGpt", SIZES),
    "xglm": causal("XGLM", {"vocab_size": VOCAB, "d_model": 16, "ffn_dim": 24, "num_layers": 2,
        "attention_heads": 2, **SPECIAL}),
    "mamba": causal("Mamba", {**SIZES, **STATE}),
    "falcon_mamba": causal("FalconMamba", {**SIZES, **STATE}),
    "mamba2": causal("Mamba2", {**SIZES, "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1,
        "chunk_size": 4}),
    "rwkv": causal("Rwkv", {**SIZES, "attention_hidden_size": 16}, plain,
        "its own batched generate differs from single rows"),
    "recurrent_gemma": causal("RecurrentGemma", {**HEADED, "num_hidden_layers": 3, "lru_width": 16,
        "attention_window_size": 16}),
    "lfm2": causal("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "qwen3_5": Architecture("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**HEADED, **LINEAR_ATTENTION}, text),
    "bamba": causal("Bamba", {**HEADED, **STATES, "attn_layer_indices": [1]}),
    "falcon_h1": causal("FalconH1", {**HEADED, **STATES, "mamba_d_ssm": 32}),
    "nemotron_h": causal("NemotronH", {
        **HEADED, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 4, "n_groups": 1, "chunk_size": 4}),
    "zamba2": causal("Zamba2", {
        **GROUPED, "num_key_value_heads": 2, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 4, "n_mamba_heads": 4, "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 4,
        "adapter_rank": 4, "num_mem_blocks": 1}),
    "xlnet": Architecture("XLNetConfig", "XLNetLMHeadModel", {"vocab_size": VOCAB, "d_model": 16, "n_layer": 2,
        "n_head": 2, "d_inner": 24}, text, whole=True),
}
MIXTURES = {
    "jamba": causal("Jamba", {
        **GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False}),
    "qwen2_moe": causal("Qwen2Moe", {**GROUPED, **MOE, "shared_expert_intermediate_size": 12}),
    "qwen3_moe": causal("Qwen3Moe", {**HEADED, **MOE}),
    "qwen3_next": causal("Qwen3Next", {**HEADED, **MOE, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 12}),
    "mixtral": causal("Mixtral", {**GROUPED, "num_local_experts": 4}),
    "olmoe": causal("Olmoe", {**GROUPED, **MOE}),
    "phimoe": causal("Phimoe", {**GROUPED, "num_local_experts": 4}),
    "granitemoe": causal("GraniteMoe", {**GROUPED, "num_local_experts": 4}),
    "granitemoehybrid": causal("GraniteMoeHybrid", {
        **GROUPED, **STATES, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
        "shared_intermediate_size": 24}),
    "minimax": causal("MiniMax", {
        **HEADED, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], "block_size": 4}),
    "afmoe": causal("Afmoe", {**HEADED, **MOE, "num_shared_experts": 1, "num_dense_layers": 1}),
    "hunyuan_v1_moe": causal("HunYuanMoEV1", {**HEADED, "num_experts": 4, "moe_topk": 2}),
    "glm4_moe": causal("Glm4Moe", {**HEADED, **MOE, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "gemma4-moe": Architecture("Gemma4TextConfig", "Gemma4ForCausalLM", {
        **HEADED, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12,
        "hidden_size_per_layer_input": 0, "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        text),
    "nemotron_h-moe": causal("NemotronH", {
        **HEADED, **MOE, "layers_block_type": ["attention", "moe"], "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 12, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4,
        "n_groups": 1, "chunk_size": 4}),
    "aria": Architecture("AriaTextConfig", "AriaTextForCausalLM", {
        **GROUPED, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, text),
    "openai_privacy_filter": Architecture("OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterForTokenClassification", {
        **HEADED, "num_local_experts": 4, "num_experts_per_tok": 2, "num_labels": 5, "sliding_window": 8,
        "max_position_embeddings": 131072}, right, ENCODER),
    "ernie4_5_moe": causal("Ernie4_5_Moe", {
        **GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1}),
    "deepseek_v2": causal("DeepseekV2", {
        **SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 12, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4}),
    "granitemoeshared": causal("GraniteMoeShared", {
        **GROUPED, "num_local_experts": 4, "shared_intermediate_size": 12}),
    "qwen3_5_moe": Architecture("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {
        **HEADED, **MOE, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 12}, text),
    "lfm2_moe": causal("Lfm2Moe", {
        **GROUPED, **MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "jetmoe": causal("JetMoe", {**GROUPED, "num_local_experts": 4, "kv_channels": 8}),
    "gpt_oss": causal("GptOss", {**HEADED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": causal("DeepseekV3", {
        **SIZES, "num_key_value_heads": 2, "moe_intermediate_size": 12, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8}),
    "llama4": Architecture("Llama4TextConfig", "Llama4ForCausalLM", {
        **HEADED, "num_local_experts": 2, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1}, text),
    "dbrx": causal("Dbrx", {
        "vocab_size": VOCAB, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, **SPECIAL,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16}}),
    "switch_transformers": seq2seq("SwitchTransformers", {
        **T5, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 2, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 64}),
    "nllb_moe": seq2seq("NllbMoe", {
        **ENCODER_DECODER, "encoder_layers": 2, "decoder_layers": 2, "encoder_sparse_step": 2,
        "decoder_sparse_step": 2, "num_experts": 2,
        "expert_capacity": 64}),
}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
ENCODERS = {
    "bert": encoder("Bert", SIZES),
    "bert-mlm": encoder("Bert", SIZES, "ForMaskedLM"),
    "roberta": encoder("Roberta", SIZES),
    "xlm-roberta": encoder("XLMRoberta", SIZES, "ForTokenClassification"),
    "electra": encoder("Electra", {**SIZES, "embedding_size": 8}),
    "albert": encoder("Albert", {**SIZES, "embedding_size": 8}, "ForMaskedLM"),
    "distilbert": encoder("DistilBert", {"vocab_size": VOCAB, "dim": 16, "hidden_dim": 24, "n_layers": 2,
        "n_heads": 2, "max_position_embeddings": 64}),
    "mobilebert": encoder("MobileBert", {**SIZES, "num_hidden_layers": 1, "embedding_size": 8,
        "intra_bottleneck_size": 16}, "ForMaskedLM"),
    "deberta": encoder("Deberta", {**SIZES, **RELATIVE}),
    "deberta-v2": encoder("DebertaV2", {**SIZES, **RELATIVE, "conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta-v3": encoder("DebertaV2", {**SIZES, **RELATIVE, "share_att_key": True, "position_buckets": 8,
        "norm_rel_ebd": "layer_norm"}),
    "modernbert": encoder("ModernBert", {**SIZES, "global_attn_every_n_layers": 2, "local_attention": 4}),
    "mpnet": encoder("MPNet", SIZES),
    "funnel": encoder("Funnel", {
        "vocab_size": VOCAB, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2,
        "d_head": 8, "d_inner": 24},
        "ForMaskedLM"),
    # the last layer's local attention does not reach the first token, which alone is classified
    "longformer": encoder("Longformer", {**SIZES, "attention_window": 4},
        unused=r"layer\.1\.attention\.self\.(query|key|value)"),
    "t5-encoder": encoder("T5", T5, "EncoderModel"),
}
ENCODER_DECODERS = {
    "t5": seq2seq("T5", {**T5, "num_layers": 2}),
    "mt5": seq2seq("MT5", T5),
    "umt5": seq2seq("UMT5", T5),
    "longt5": seq2seq("LongT5", {**T5, "local_radius": 4}),
    "bart": seq2seq("Bart", ENCODER_DECODER),
    "mbart": seq2seq("MBart", {**ENCODER_DECODER, "scale_embedding": True}),
    "pegasus": seq2seq("Pegasus", ENCODER_DECODER),
    "m2m_100": seq2seq("M2M100", ENCODER_DECODER),
    "mvp": seq2seq("Mvp", ENCODER_DECODER),
    "marian": Architecture("MarianConfig", "MarianMTModel", ENCODER_DECODER, pair),
    "pegasus_x": seq2seq("PegasusX", {**ENCODER_DECODER, "block_size": 4, "num_global_tokens": 2}),
    "t5gemma": seq2seq("T5Gemma", {"vocab_size": VOCAB, "encoder": HEADED, "decoder": HEADED}),
    "bigbird_pegasus": seq2seq("BigBirdPegasus", {**ENCODER_DECODER, "attention_type": "original_full"}),
    "led": seq2seq("LED", {
        **ENCODER_DECODER, "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}, unused="_global"),
    "prophetnet": seq2seq("ProphetNet", {
        "vocab_size": VOCAB, "hidden_size": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
        "num_encoder_layers": 1, "num_decoder_layers": 1,
        "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "decoder_start_token_id": 1, **SPECIAL}),
    "fsmt": seq2seq("FSMT", {
        **{k: v for k, v in ENCODER_DECODER.items() if k != "vocab_size"}, "langs": ["en", "de"],
        "src_vocab_size": VOCAB,
        "tgt_vocab_size": VOCAB}, whole=True),
    "whisper": seq2seq("Whisper", {
        **ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64,
        "begin_suppress_tokens": None}, spoken),
    "encoder-decoder": Architecture("EncoderDecoderConfig", "EncoderDecoderModel", {"pad_token_id": 0,
        "decoder_start_token_id": 1}, pair,
        unused=r"encoder\.pooler\.dense", parts={
            "encoder": ("BertConfig", SIZES), "decoder": ("BertConfig", {**SIZES, "is_decoder": True,
            "add_cross_attention": True})}),
    "vision-encoder-decoder": Architecture(
        "VisionEncoderDecoderConfig", "VisionEncoderDecoderModel", {"pad_token_id": 0, "decoder_start_token_id": 1},
        described,
        unused=r"encoder\.pooler\.dense", parts={"encoder": ("ViTConfig", IMAGE), "decoder": ("GPT2Config", {**GPT,
        "add_cross_attention": True})}),
}
OTHER_INPUTS = {
    "vit": vision("ViT", IMAGE),
    "dinov2": vision("Dinov2", IMAGE),
    "beit": vision("Beit", {**IMAGE, "use_relative_position_bias": True}),
    "swin": vision("Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2,
        2], "window_size": 2}, inputs=large_image),
    "swinv2": vision("Swinv2", {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2},
        inputs=large_image),
    "convnext": vision("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
        "layer_scale_init_value": 1.0}, inputs=large_image),
    "clip": vision("CLIP", {"projection_dim": 8, "text_config": SIZES, "vision_config": IMAGE}, "Model", captioned),
    "siglip": vision("Siglip", {"text_config": {**SIZES, "projection_size": 16}, "vision_config": IMAGE}, "Model",
        captioned),
    "wav2vec2": vision("Wav2Vec2", SPEECH, "ForCTC", audio),
    "wavlm": vision("WavLM", SPEECH, "ForCTC", audio),
    "wav2vec2-conformer": vision("Wav2Vec2Conformer", {
        **SPEECH, "position_embeddings_type": "relative"}, "ForCTC", audio),
    "wav2vec2-bert": vision("Wav2Vec2Bert", {**SPEECH, "feature_projection_input_dim": 8}, "ForCTC", sound),
    "sew-d": vision("SEWD", {**SPEECH, **RELATIVE, "squeeze_factor": 2}, "ForCTC", audio),
    "llava": seq2seq("Llava", {"image_token_index": VOCAB - 1, "vision_feature_layer": -1}, with_image,
        splits=False, parts={
        "vision_config": ("CLIPVisionConfig", IMAGE), "text_config": ("LlamaConfig", GROUPED)}),
    "paligemma": seq2seq("PaliGemma", {
        "image_token_index": VOCAB - 1, "projection_dim": 16, "text_config": {**HEADED, "model_type": "gemma"},
        "vision_config": {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False}}, prefixed),
    "gemma3-vision": seq2seq("Gemma3", {
        "image_token_index": VOCAB - 1, "mm_tokens_per_image": 4, "text_config": HEADED,
        "vision_config": {**IMAGE, "image_size": 16, "vision_use_head": False}}, prefixed_large),
    "idefics3": seq2seq("Idefics3", {
        "image_token_id": VOCAB - 1, "scale_factor": 2, "vision_config": {**IMAGE, "image_size": 16},
        "text_config": {**GROUPED, "model_type": "llama"}}, with_pictures, splits=False),
    "blip-2": seq2seq("Blip2", {"num_query_tokens": 4, "image_token_index": VOCAB - 1}, with_image,
        "its generate runs the language model by itself, which is no entry point", parts={
            "vision_config": ("Blip2VisionConfig", IMAGE), "qformer_config": ("Blip2QFormerConfig", {**SIZES,
            "encoder_hidden_size": 16}),
            "text_config": ("OPTConfig", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16})}),
    "qwen2_vl": seq2seq("Qwen2VL", {
        "image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 3,
        "vision_end_token_id": VOCAB - 4,
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 4,
                          "spatial_merge_size": 2, "temporal_patch_size": 2},
        "text_config": {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
        "mrope_section": [1, 1, 2]}}},
        with_patches, splits=False),
}
# fmt: on

ARCHITECTURES = {**DECODERS, **MIXTURES, **ENCODERS, **ENCODER_DECODERS, **OTHER_INPUTS}
