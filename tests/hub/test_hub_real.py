"""Real weights: the one-block cut's gold values, the whole SmolLM2, and how much memory loading takes."""

import json
import sys

import pytest
import torch

import phylon
from checkpoint.memory import peak_anonymous_bytes
from phylon.checkpoint import open_gguf
from phylon.families.decoder import llama_spec
from phylon.hub import load, save
from phylon.hub.save import save_gguf
from phylon.model import build

from .hub_data import logits, shared, smollm2


@pytest.fixture(scope="module")
def gold():
    return json.loads(shared("models/smollm2-1layer-gold.json").read_text())


@pytest.fixture(scope="module")
def cut():
    return load(shared("models/smollm2-1layer-5120.Q4_1.gguf"), device="cpu")


def test_the_cut_is_read_as_it_is(cut, gold):
    source = open_gguf(shared("models/smollm2-1layer-5120.Q4_1.gguf"))
    for name, expected in gold["tensors"].items():
        values = source.read(name)
        assert source.tensors[name].dtype == expected["type"]
        assert list(values.shape) == expected["shape"]
        flat = values.reshape(-1).double()
        assert flat[:4].tolist() == pytest.approx(expected["first4"], abs=1e-6)
        assert flat[-2:].tolist() == pytest.approx(expected["last2"], abs=1e-6)
        assert float(flat.sum()) == pytest.approx(expected["sum"], rel=1e-6, abs=1e-4)
        assert float(flat.square().sum()) == pytest.approx(expected["sumsq"], rel=1e-6, abs=1e-4)
    assert cut.stored_dtype == "Q4_1+F32+Q8_0"
    assert cut.dtype == torch.float32
    assert cut.spec.last_stack.norm_final.eps == 1e-5
    q = cut.state_dict()["decoder.blocks.0.attn.q_proj.weight"]
    assert q[0, :4].tolist() == pytest.approx(gold["tensors"]["blk.0.attn_q.weight"]["first4"], abs=1e-6)
    assert torch.equal(q[32], source.read("blk.0.attn_q.weight")[1]), "q is half-split inside"


def test_the_cut_computes_its_gold_values(cut, gold):
    tokens = torch.tensor([gold["ids"]])
    with torch.no_grad():
        out = cut(tokens)
        logprobs = out.logits.log_softmax(-1)[0]
    last = out.logits[0, -1]
    assert last[:8].tolist() == pytest.approx(gold["last_logits_first8"], abs=2e-3)
    assert logprobs[-1].topk(5).indices.tolist() == gold["last_top5_ids"]
    assert logprobs[-1].topk(5).values.tolist() == pytest.approx(gold["last_top5_logprob"], abs=1e-3)
    assert out.hidden[0, -1, :6].tolist() == pytest.approx(gold["final_normed_last_first6"], abs=1e-3)
    nll = -logprobs[:-1].gather(1, tokens[0, 1:, None]).mean()
    assert float(nll) == pytest.approx(gold["mean_nll"], abs=1e-3)
    assert float(out.logits.double().sum()) == pytest.approx(gold["logits_sum"], rel=1e-4)


def test_the_cut_goes_round(cut, tmp_path):
    save(cut, tmp_path / "hf", format="hf")
    save_gguf(cut, tmp_path / "a.gguf", quant="F32")
    for path in ("hf", "a.gguf"):
        back = load(tmp_path / path, device="cpu")
        assert back.spec.replace(init=cut.spec.init) == cut.spec
        assert torch.equal(logits(back), logits(cut))


def test_smollm2_answers():
    model = load(smollm2(), device="cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.tokenizer.chat_ids(chat)
    state, given, answer = model.new_state(1), torch.tensor([ids]), []
    with torch.no_grad():
        while len(answer) < 20:
            token = int(model(given, state=state, logits="last").logits[0, -1].argmax())
            if token in model.generation.eos_ids:
                break
            answer.append(token)
            given = torch.tensor([[token]])
    assert model.tokenizer.decode(answer) == "The capital of France is Paris."
    assert phylon.preset("smollm2-135m").decoder.blocks == model.spec.decoder.blocks


LOAD = "from phylon.hub import load\nmodel = load({path!r}, dtype={dtype!r}, device='cpu')"
SETUP = """
import torch, phylon.hub, phylon.families
from phylon.checkpoint import open_gguf
torch.ones(1 << 16).bfloat16().float().t().contiguous()
torch.set_num_threads(1)
"""
BIG = llama_spec(d_model=1024, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=2048, vocab_size=2048, max_seq_len=64)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Paths of one model in both formats, its size and that of its largest tensor in numbers."""
    folder, model = tmp_path_factory.mktemp("big"), build(BIG, device="cpu")
    paths = {"hf": save(model, folder / "hf", format="hf"), "Q4_1": save_gguf(model, folder / "a.gguf", quant="Q4_1")}
    sizes = [p.numel() for p in model.parameters()]
    return paths, sum(sizes), max(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("hf", "bfloat16"), ("hf", "float32"), ("Q4_1", "float32"), ("Q4_1", "bfloat16")]
)
def test_case_12_peak_memory(kind, dtype, big):
    """At most 1.1 times the final size plus one tensor, when casting and when decoding."""
    paths, total, largest = big
    final = total * getattr(torch, dtype).itemsize
    peak = peak_anonymous_bytes(SETUP, LOAD.format(path=str(paths[kind]), dtype=dtype))
    assert 0.9 * final < peak <= 1.1 * final + 4 * largest, (peak / final, 4 * largest / final)
