"""The conformance suite of every family: what training computes is what drafting computes.

Families are found, not listed: a new file in heads/families/ is tested here without an edit. Two throw-away families
(tests/throwaway_families.py) hold the contract where position-wise families do not use it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from family_checks import DEFAULT_TOLERANCE, TOLERANCE, backbone_of, drafted, prefilled, teacher_forced
from matrices import covering
from throwaway_families import FAMILIES, VARIANTS, make_heads
from tiny import ARCHITECTURES, VOCAB, random_tokens, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.trees.static import Tree
from heads.families import build_config, family_module
from heads.interface.token_heads import HeadsConfig, TokenHeads

NUM_HEADS = 3
TREE = Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0], [1, 1], [2]])  # nodes 1 2 3 4 5 6 7 8, the root is 0

KINDS = (*FAMILIES, *VARIANTS, "mtp, per head")
# Heads with keys and values of their own are held against each kind of window.
everything = covering(
    family=KINDS,
    name=(*ARCHITECTURES, "mistral_windowed", "gemma3"),
    repeats=2,
    always=lambda family, name: name == "mistral_windowed",
)


@everything
def test_teacher_forcing_equals_drafting_along_the_true_tokens(family, name):
    token_heads = make_heads(family, backbone_of(name), num_heads=NUM_HEADS)
    tokens_BT = random_tokens(2, 14, seed=11)
    documents_BT = torch.tensor([[0] * 14, [0] * 6 + [1] * 8])
    states = teacher_forced(token_heads, tokens_BT, documents_BT)
    prefixes, following, where = [], [], []
    for b, first, end in ((0, 0, 14), (1, 0, 6), (1, 6, 14)):  # every prefix of every document is one row of a batch
        document = tokens_BT[b, first:end].tolist()
        for t in range(len(document) - 2):
            prefixes.append(document[: t + 1])
            following.append((document[t + 1 :] + [0] * NUM_HEADS)[:NUM_HEADS])
            where.append((b, first + t, end))
    steps = drafted(token_heads, prefilled(token_heads, prefixes)[1], torch.tensor(following))
    compared = 0
    for row, (b, t, end) in enumerate(where):
        for k in range(1, NUM_HEADS + 1):
            if t + 1 + k < end:
                error = (steps[k - 1][row] - states[k - 1][b, t]).abs().max()
                assert error < TOLERANCE.get(name, DEFAULT_TOLERANCE), f"head {k} at {t}, row {b}"
                compared += 1
    assert compared == sum(len(head) for head in states)


@everything
def test_state_after_ragged_commits_equals_a_prefill_of_the_same_tokens(family, name):
    """Three tree passes over a left-padded batch; paths differ in length, leave holes, and one row skips a pass."""
    token_heads = make_heads(family, backbone_of(name), num_heads=NUM_HEADS)
    backbone = token_heads.backbone
    texts = [random_tokens(9, seed=12).tolist(), random_tokens(4, seed=13).tolist()]
    state, heads_state = prefilled(token_heads, texts)
    following = random_tokens(2, NUM_HEADS, seed=14)
    for seed, paths in enumerate([[[0, 5, 7], [0]], [[0, 1, 2, 3], [0, 1, 4]], [[], [0, 8]], [[0, 5], [0, 5, 6]]]):
        tokens_BN = random_tokens(2, TREE.num_nodes, seed=20 + seed)
        with torch.no_grad():
            output = backbone.verify(state, tokens_BN, TREE.depth_tensor("cpu"), TREE.sees_NN(), taps=token_heads.taps)
            plan = CommitPlan.from_paths(paths, "cpu")
            heads_state = token_heads.commit(heads_state, tokens_BN, output.taps, output.positions_BN, plan)
            state = backbone.commit(state, output, plan)
        for b, text in enumerate(texts):
            text += tokens_BN[b, paths[b]].tolist()
        found = drafted(token_heads, heads_state, following)
        for b, text in enumerate(texts):
            wanted = drafted(token_heads, prefilled(token_heads, [text])[1], following[b : b + 1])
            for k in range(NUM_HEADS):
                error = (found[k][b] - wanted[k][0]).abs().max()
                assert error < TOLERANCE.get(name, DEFAULT_TOLERANCE), f"head {k + 1}, row {b}, pass {seed}"


@pytest.mark.parametrize("family", KINDS)
def test_step_reads_each_nodes_own_parent(family):
    """Many nodes at once equal one node at a time: two rows, three nodes a level with mixed parents."""
    token_heads = make_heads(family, backbone_of("llama"), num_heads=NUM_HEADS)
    texts = [random_tokens(6, seed=15).tolist(), random_tokens(4, seed=16).tolist()]
    _, heads_state = prefilled(token_heads, texts)
    roots_B = random_tokens(2, seed=17)
    tokens = {2: random_tokens(6, seed=18), 3: random_tokens(4, seed=19)}
    parents = {2: torch.tensor([0, 0, 0, 1, 1, 1]), 3: torch.tensor([5, 0, 2, 0])}
    with torch.no_grad():
        level = token_heads.first_level(heads_state)
        first, level = token_heads.step(1, level, roots_B, torch.arange(2))
        second, level = token_heads.step(2, level, tokens[2], parents[2])
        third, _ = token_heads.step(3, level, tokens[3], parents[3])
    for m in range(4):
        parent = int(parents[3][m])
        row = int(parents[2][parent])
        path = torch.tensor([[roots_B[row], tokens[2][parent], tokens[3][m]]])
        alone = drafted(token_heads, prefilled(token_heads, [texts[row]])[1], path)
        for found, wanted in zip((first[row], second[parent], third[m]), alone, strict=True):
            # float64 products of other batch shapes
            torch.testing.assert_close(found, wanted[0], atol=DEFAULT_TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("family", KINDS)
def test_grounded_says_whether_drafted_tokens_are_read(family):
    """An independent family must not change with drafted tokens: the decoder computes one row for all nodes."""
    token_heads = make_heads(family, backbone_of("llama"), num_heads=NUM_HEADS)
    _, heads_state = prefilled(token_heads, [random_tokens(6, seed=15).tolist()])
    one = drafted(token_heads, heads_state, torch.tensor([[3, 4, 5]]))
    for position in range(NUM_HEADS):
        tokens = [3, 4, 5]
        tokens[position] = 9
        other = drafted(token_heads, heads_state, torch.tensor([tokens]))
        for k in range(NUM_HEADS):
            reads = token_heads.grounded and position <= k
            assert (not torch.equal(one[k], other[k])) == reads, f"head {k + 1} and the token at t+{position + 1}"


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_nothing_of_the_backbone_is_registered(family):
    model = tiny_model("qwen3")
    token_heads = make_heads(family, Backbone(model))
    own = {id(parameter) for parameter in token_heads.parameters()}
    assert own
    assert own.isdisjoint(id(parameter) for parameter in model.parameters())
    storages = {parameter.untyped_storage().data_ptr() for parameter in token_heads.parameters()}
    assert storages.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in model.parameters())
    assert not any("backbone" in name for name in token_heads.state_dict())
    assert not any(module is model or module is model.get_decoder() for module in token_heads.modules())


@pytest.mark.parametrize("family", KINDS)
def test_heads_and_blocks_share_no_parameter(family):
    """[Block(d)] * n is one block n times; such heads train and save, and are wrong."""
    token_heads = make_heads(family, backbone_of("llama"), num_heads=4)
    names: dict[int, list[str]] = {}
    for name, parameter in token_heads.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    assert [shared for shared in names.values() if len(shared) > 1] == []


@pytest.mark.parametrize("unembedding", ["own", "shared"])
def test_medusa_with_three_blocks_has_three_weights(unembedding):
    token_heads = heads.create("medusa", backbone_of("llama"), num_heads=2, num_blocks=3, unembedding=unembedding)
    for body in token_heads.bodies:
        assert len({id(block.linear.weight) for block in body}) == 3
    assert len(list(token_heads.parameters())) == 2 * 3 * 2 + (2 if unembedding == "own" else 0)


def test_own_unembeddings_are_copies_one_a_head():
    backbone = backbone_of("codegen")  # its unembedding has a bias
    token_heads = heads.create("medusa", backbone, num_heads=3)
    with torch.no_grad():
        token_heads.unembeddings.weights[0].zero_()
        token_heads.unembeddings.biases[0].zero_()
    assert token_heads.projection(2).weight.abs().sum() > 0
    assert token_heads.projection(2).bias.abs().sum() > 0
    assert backbone.projection.weight.abs().sum() > 0
    assert token_heads.projection(1).weight.abs().sum() == 0


@pytest.mark.parametrize("family", heads.families())
@pytest.mark.parametrize("name", ["llama", "codegen", "cohere"])
def test_untrained_heads_start_as_the_backbone(family, name):
    """Both published families start as the identity with the backbone's own unembedding (Medusa, section 2.1)."""
    if family not in ("medusa", "grounded"):
        pytest.skip("only these two say how they start")
    backbone = backbone_of(name)
    token_heads = heads.create(family, backbone, num_heads=2).double()
    tokens = random_tokens(1, 6, seed=21)
    _, heads_state = prefilled(token_heads, tokens.tolist())
    steps = drafted(token_heads, heads_state, torch.tensor([[3, 4]]))
    with torch.no_grad():
        wanted = backbone.model(input_ids=tokens, use_cache=False).logits[0, -1]
        for k in (1, 2):
            # The copied unembedding has passed through float32: 1e-7 of logits of at most 20.
            torch.testing.assert_close(token_heads.projection(k)(steps[k - 1])[0], wanted, atol=1e-5, rtol=0.0)


def test_parameter_counts_follow_the_formula():
    width, vocab = 32, VOCAB
    backbone = backbone_of("llama")
    for num_heads, num_blocks in ((1, 1), (4, 2)):
        token_heads = heads.create("medusa", backbone, num_heads=num_heads, num_blocks=num_blocks)
        assert count(token_heads) == num_heads * (num_blocks * (width * width + width) + vocab * width)
    for hidden, layers in ((None, 1), (48, 3)):
        token_heads = heads.create(
            "grounded", backbone, num_heads=3, hidden_width=hidden, num_hidden_layers=layers, unembedding="shared"
        )
        w = hidden or width
        down = 0 if w == width else w * width
        wanted = sum(2 * (k + 1) * width * w + w + (layers - 1) * (w * w + w) + down for k in (1, 2, 3))
        assert count(token_heads) == wanted


def test_parameter_counts_of_a_7b_on_the_meta_device():
    """Hidden 4096, vocabulary 32000: what Ankner et al. and Cai et al. attach heads to. No memory is taken."""
    config = LlamaConfig(
        hidden_size=4096, vocab_size=32000, num_hidden_layers=1, num_attention_heads=32, intermediate_size=64
    )
    with torch.device("meta"):
        backbone = Backbone(LlamaForCausalLM(config), check_projection=False)
        grounded = family_module("grounded").Heads(build_config("grounded", num_heads=4, hidden_width=4096), backbone)
        medusa = family_module("medusa").Heads(build_config("medusa", num_heads=5), backbone)
    square = 4096 * 4096
    assert count(grounded) == (2 + 3 + 4 + 5) * 2 * square + 4 * 4096 + 4 * 32000 * 4096
    assert count(medusa) == 5 * (square + 4096 + 32000 * 4096)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- finding and configuring -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", heads.families())
def test_a_family_file_holds_the_two_names(family):
    module = family_module(family)
    assert dataclasses.is_dataclass(module.Config)
    assert issubclass(module.Config, HeadsConfig)
    assert issubclass(module.Heads, TokenHeads)
    assert all(field.kw_only for field in dataclasses.fields(module.Config))
    assert heads.create(family, backbone_of("llama")).family == family


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ValueError, match=r"family='meduza' .* Did you mean 'medusa'\?"):
        heads.create("meduza", backbone_of("llama"))


@pytest.mark.parametrize(
    ("family", "field", "nearest"),
    [("medusa", "num_block", "num_blocks"), ("grounded", "hidden_with", "hidden_width"), ("medusa", "num_hedas", None)],
)
def test_an_unknown_field_names_the_nearest(family, field, nearest):
    with pytest.raises(ValueError, match=f"'{field}' is no field of {family} heads; allowed are num_heads, ") as caught:
        heads.create(family, backbone_of("llama"), **{field: 2})
    if nearest:
        assert f"Did you mean {nearest!r}?" in str(caught.value)


@pytest.mark.parametrize("family", heads.families())
@pytest.mark.parametrize("num_heads", [0, -1, 33])
def test_the_number_of_heads_has_a_range(family, num_heads):
    with pytest.raises(ValueError, match=rf"num_heads={num_heads} was given; allowed are integers from 1 to 32"):
        heads.create(family, backbone_of("llama"), num_heads=num_heads)


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("medusa", {"num_blocks": 0}, "num_blocks=0 .* from 1 to 8"),
        ("medusa", {"unembedding": "mine"}, "unembedding='mine' .* 'own' and 'shared'"),
        ("grounded", {"num_hidden_layers": 5}, "num_hidden_layers=5 .* from 1 to 4"),
        ("grounded", {"hidden_width": 0}, "hidden_width=0 was given; allowed are integers from 1 to 131072, or null"),
        ("grounded", {"unembedding": None}, "unembedding=None was given; allowed are 'own' and 'shared'"),
    ],
)
def test_values_out_of_range_are_refused(family, config, said):
    with pytest.raises(ValueError, match=said):
        heads.create(family, backbone_of("llama"), **config)


@pytest.mark.parametrize(
    ("family", "name", "value", "allowed"),
    [
        ("grounded", "num_heads", "four", "integers from 1 to 32"),
        ("grounded", "num_heads", 2.5, "integers from 1 to 32"),
        ("medusa", "num_heads", True, "integers from 1 to 32"),
        ("grounded", "hidden_width", "8", "integers from 1 to 131072, or null; the widest backbones have 16384"),
        ("grounded", "normalize_embeddings", 1, "true and false"),
        ("medusa", "unembedding", 3, "'own' and 'shared'"),
    ],
)
def test_a_value_of_another_type_is_refused(family, name, value, allowed):
    with pytest.raises(ValueError, match=f"^{name}={value!r} was given; allowed are {allowed}.$"):
        build_config(family, **{name: value})


def test_a_field_named_family_is_an_unknown_field():
    with pytest.raises(ValueError, match="'family' is no field of grounded heads"):
        build_config("grounded", **{"family": "medusa"})
