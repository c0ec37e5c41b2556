import copy
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma2Config, GptOssConfig, Qwen2MoeConfig

from lightning_rl_engines.sequence.attention import KERNELS, bind_sequence_parallel, ensure_registered, select_kernel
from lightning_rl_engines.sequence.kernels import same_head_size, sdpa
from tests.sequence.attention_cases import LENGTHS, assert_exact, packed, packed_logits, reference, row_of
from tests.support.models import MODEL_NAMES, random_documents, tiny_model

CPU = torch.device("cpu")


def bound(name: str = "qwen3", kernel: str = "packed_sdpa", **changes: Any) -> Any:
    model = tiny_model(name, **changes)
    bind_sequence_parallel(model, None, kernel=kernel)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_packed_row_equals_its_documents_one_by_one(name: str, checkpointing: bool) -> None:
    logits, gradients = packed(name, checkpointing=checkpointing)
    expected_logits, expected_gradients = reference(name)
    assert_exact(logits, expected_logits)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in gradients.items():
        assert_exact(gradient, expected_gradients[key], key)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["qwen3", "one_kv", "mistral_window"])
def test_flex_equals_sdpa_on_the_cpu_without_gradients(name: str) -> None:
    documents = random_documents(LENGTHS)
    with torch.no_grad():
        logits = packed_logits(bound(name, "packed_flex"), documents)
    assert_exact(logits, reference(name)[0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_builds_one_mask_per_row_and_refuses_to_train_on_the_cpu() -> None:
    model = bound(kernel="packed_flex")
    documents = random_documents(LENGTHS)
    masks = model.model.layers[0].self_attn.packed_attention.block_masks
    assert masks is model.model.layers[1].self_attn.packed_attention.block_masks
    row = row_of(LENGTHS)
    with torch.no_grad():
        model(input_ids=torch.cat(documents)[None], packed_row=row, use_cache=False)
    assert len(masks) == 1 and len(masks[row]) == 1
    del row
    assert len(masks) == 0
    with pytest.raises(ValueError, match="no backward on the CPU"):
        packed_logits(model, documents)


def test_the_window_changes_the_outcome_and_only_for_longer_documents() -> None:
    windowed, plain = bound("mistral_window"), bound("mistral_window", sliding_window=None)
    outputs = [packed_logits(model, random_documents(LENGTHS)).split(LENGTHS) for model in (windowed, plain)]
    for length, ours, theirs in zip(LENGTHS, *outputs, strict=True):
        assert_exact(ours[:8], theirs[:8])
        assert torch.equal(ours, theirs) == (length <= 8)


def test_a_window_that_the_model_keeps_in_its_mask_is_honoured() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2MoeConfig(
        vocab_size=64, **sizes, num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=2, num_experts_per_tok=2,
        initializer_range=0.2,
    )  # fmt: skip
    assert config.layer_types == ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    documents = random_documents(LENGTHS)
    expected = torch.cat([model(input_ids=d[None], use_cache=False).logits[0] for d in documents])
    bind_sequence_parallel(model, None, kernel="packed_sdpa")
    assert_exact(packed_logits(model, documents), expected)
    assert [layer.self_attn.packed_attention.window for layer in model.model.layers] == [4, None]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_changing_one_document_moves_no_other(checkpointing: bool) -> None:
    # Known fault 19.
    model = bound()
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    documents = random_documents(LENGTHS)
    changed = [(documents[0] + 1) % 64, *documents[1:]]
    before, after = (packed_logits(model, d).split(LENGTHS) for d in (documents, changed))
    assert not torch.allclose(before[0], after[0])
    for ours, theirs in zip(before[1:], after[1:], strict=True):
        assert torch.equal(ours, theirs)


def test_no_gradient_reaches_another_document() -> None:
    # Known fault 20.
    model = bound()
    documents = random_documents(LENGTHS)
    embeddings = model.get_input_embeddings()(torch.cat(documents)[None]).detach().requires_grad_()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    logits = model(inputs_embeds=embeddings, position_ids=positions, packed_row=row_of(LENGTHS), use_cache=False).logits
    logits[0].split(LENGTHS)[2].square().sum().backward()
    gradients = embeddings.grad[0].split(LENGTHS)
    assert [bool(gradient.any()) for gradient in gradients] == [False, False, True, False]


def test_the_place_of_a_document_in_the_row_does_not_matter() -> None:
    # Known fault 21.
    document, *others = random_documents(LENGTHS)
    logits = packed_logits(bound(), [document, *others[:1], document, *others[1:]])
    start = len(document) + len(others[0])
    torch.testing.assert_close(logits[: len(document)], logits[start : start + len(document)], rtol=0, atol=1e-6)


def test_auto_and_refused_kernels() -> None:
    cuda = torch.device("cuda")
    assert select_kernel("auto", CPU) == "packed_sdpa"
    assert select_kernel("auto", cuda) == "packed_varlen"
    assert select_kernel("auto", cuda, dtype=torch.float32) == "packed_sdpa"
    assert select_kernel("packed_flex", CPU) == "packed_flex"
    for requested, device, dtype, message in (
        ("sdpa", CPU, None, "'sdpa' is not known"),
        ("packed_varlen", CPU, None, "needs CUDA"),
        ("packed_flash", CPU, None, "needs CUDA"),
        ("packed_varlen", cuda, torch.float32, "half precision"),
    ):
        with pytest.raises(ValueError, match=message):
            select_kernel(requested, device, dtype=dtype)


def test_registration_adds_our_names_only_and_may_be_repeated() -> None:
    ensure_registered()
    before = dict(AttentionInterface().items())
    ensure_registered()
    after = dict(AttentionInterface().items())
    assert before == after
    assert set(KERNELS) <= set(after)


def test_a_binding_leaves_the_state_dict_alone_and_survives_copies() -> None:
    plain, model = tiny_model("qwen3"), bound()
    assert model.state_dict().keys() == plain.state_dict().keys()
    documents = random_documents(LENGTHS)
    assert torch.equal(packed_logits(copy.deepcopy(model), documents), packed_logits(model, documents))


def test_calls_that_would_be_wrong_are_refused() -> None:
    model = bound()
    ids = torch.zeros(1, 8, dtype=torch.long)
    mask = torch.zeros(1, 1, 8, 8)
    for arguments, message in (
        ({"input_ids": ids}, "got no packed_row"),
        ({"input_ids": ids, "packed_row": row_of([4, 5])}, "8 tokens .* packed_row has 9"),
        ({"input_ids": ids.expand(2, 8), "packed_row": row_of([8])}, "one row"),
        ({"input_ids": ids, "packed_row": row_of([8]), "attention_mask": mask}, "attention mask"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**arguments, use_cache=False)
    model.config.use_cache = True
    cache = model(input_ids=ids, packed_row=row_of([8]), use_cache=True).cache
    with pytest.raises(ValueError, match="no cache"):
        model(input_ids=ids[:, :1], packed_row=row_of([1]), cache=cache)


def test_an_unbound_model_is_refused() -> None:
    ensure_registered()
    model = tiny_model("llama", attn_implementation="packed_sdpa")
    with pytest.raises(ValueError, match="call bind_sequence_parallel"):
        packed_logits(model, random_documents(LENGTHS))


def test_attention_dropout_is_refused_in_training_only() -> None:
    model = bound("llama", attention_dropout=0.1)
    packed_logits(model.eval(), random_documents(LENGTHS))
    with pytest.raises(ValueError, match=r"attention_dropout=0\.0"):
        packed_logits(model.train(), random_documents(LENGTHS))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=32), "softcapping=50"),
        (GptOssConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=32), "sinks"),
    ],
)
def test_features_that_no_kernel_has_are_refused_at_binding(config: Any, message: str) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match=message):
        bind_sequence_parallel(model, None, kernel="packed_sdpa")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_frequencies_that_depend_on_the_row_are_refused(rope: dict[str, Any]) -> None:
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match=f"rope_type='{rope['rope_type']}'"):
        bind_sequence_parallel(model, None, kernel="packed_sdpa")


def test_head_sizes_are_padded_for_flash_kernels_without_a_trace() -> None:
    row = row_of([3, 4])
    query, key, value = torch.randn(7, 4, 12), torch.randn(7, 2, 12), torch.randn(7, 2, 10)
    masks: Any = WeakKeyDictionary()
    plain = sdpa(query, key, value, row, scale=None, window=None, block_masks=masks)
    padded_query, padded_key, padded_value, scale = same_head_size(query, key, value, None)
    assert padded_query.shape[-1] == padded_key.shape[-1] == padded_value.shape[-1] == 16
    padded = sdpa(padded_query, padded_key, padded_value, row, scale=scale, window=None, block_masks=masks)
    assert torch.allclose(padded[..., :10], plain, atol=1e-6)
    assert not padded[..., 10:].any()
    with pytest.raises(ValueError, match="size 264"):
        same_head_size(torch.randn(1, 1, 260), torch.randn(1, 1, 260), torch.randn(1, 1, 260), None)


def test_softcap_and_sinks_are_refused_in_the_call() -> None:
    model = bound()
    module = model.model.layers[0].self_attn
    function = AttentionInterface()["packed_sdpa"]
    query = torch.randn(1, 4, 8, 16)
    for option in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=option):
            function(module, query, query, query, None, packed_row=row_of([8]), **{option: torch.ones(4)})
    with pytest.raises(ValueError, match="is_causal=False"):
        function(module, query, query, query, None, packed_row=row_of([8]), is_causal=False)


def test_models_that_do_not_attend_through_the_interface_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="kernel='eager'"):
        bind_sequence_parallel(model, None, kernel="eager")
    with pytest.raises(ValueError, match="holds no transformers model"):
        bind_sequence_parallel(nn.Linear(2, 2), None, kernel="packed_sdpa")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.self_attn' is not causal"):
        bind_sequence_parallel(model, None, kernel="packed_sdpa")
    del model.model.layers[1].self_attn.is_causal
    with pytest.raises(ValueError, match="2 layers but 1 attention modules"):
        bind_sequence_parallel(model, None, kernel="packed_sdpa")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        bind_sequence_parallel(model, None, kernel="packed_sdpa")
    # Refused before anything was changed.
    assert model.config._attn_implementation == "eager"
    assert not hasattr(model.model.layers[0].self_attn, "packed_attention")


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["packed_varlen", "packed_flex", "packed_sdpa"])
@pytest.mark.parametrize("window", [None, 8])
def test_kernels_agree_on_cuda(kernel: str, window: int | None) -> None:
    dtype = torch.bfloat16
    row = row_of([200, 1, 55])
    row = type(row)(cu_seqlens=row.cu_seqlens.cuda(), cu_seqlens_host=row.cu_seqlens_host, max_seqlen=row.max_seqlen)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, heads, 64, generator=generator).cuda() for heads in (4, 2, 2)]
    weights = torch.randn(256, 4, 64, generator=generator).cuda()

    def run(name: str, precision: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(precision).detach().requires_grad_() for x in inputs]
        output = KERNELS[name](*leaves, row, scale=None, window=window, block_masks=WeakKeyDictionary())
        (output.float() * weights).sum().backward()
        return [output.detach().float(), *(leaf.grad.float() for leaf in leaves)]

    for ours, expected in zip(run(kernel, dtype), run("packed_sdpa", torch.float32), strict=True):
        torch.testing.assert_close(ours, expected, rtol=3e-2, atol=3e-2)
