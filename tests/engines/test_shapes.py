"""Engine shapes beside the session's, each on a small cluster of its own (`docs/engines.md` has the whole list)."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from bidikv_server.launch import readiness
from bidikv_server.launch.cluster import ClusterSpec
from bidikv_server.launch.model import prepare_smollm2
from bidikv_server.launch.recipe import ReuseSettings

from .conftest import BLOCK, sample
from .tiny_models import checkpoint
from .tokens import REUSED, TokenPlayer, check_turns, refused, words

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def shape(model, *engine_args, **changes):
    """One prefill and one decode engine, and prefill without a prefix cache of its own, unless told otherwise."""
    args = ("--num-gpu-blocks-override", "400", *engine_args)
    return ClusterSpec(checkpoint(model), engine_args=args, **{"prefill_prefix_caching": False, **changes})


@pytest.fixture
def play(stage):
    """Start a cluster, unless it runs, and play on it."""
    players = []

    def start(spec):
        players.append(TokenPlayer(stage.cluster(spec)))
        return players[-1]

    yield start
    for player in players:
        player.close()


def total(urls, name, label=""):
    """A metric, summed over engines."""
    return sum(sample(readiness.fetch(f"{url}/metrics"), name, label) for url in urls)


def test_several_decode_engines_without_prefix_caching(play):
    """A conversation stays on its engine; a fork that goes to the other one still reads from where the blocks are."""
    player = play(shape("llama", decode=2, decode_args=("--no-enable-prefix-caching",)))
    check_turns(player, REUSED)
    first = words(300, 1)
    history = [*first, *player.turn(first).token_ids]
    # While its engine is busy with the conversation itself, a fork goes to the other one.
    busy = player.client.completions.create(
        model=player.model,
        prompt=[*history, *words(40, 2)],
        temperature=0,
        max_tokens=3000,
        stream=True,
        extra_headers={"X-Session-ID": player.session},
        extra_body={"cache_salt": player.salt, "ignore_eos": True},
    )
    next(busy)
    fork = [*history, *words(40, 3)]
    answer = player.turn(fork, session=f"{player.session}-fork")
    busy.close()
    assert answer.reuse.reason == "hit"
    assert answer.token_ids == player.cold(fork).token_ids
    assert total(player.cluster.decode_urls[1:], "vllm:request_success_total", 'finished_reason="length"') > 0
    onward = [*fork, *answer.token_ids, *words(40, 4)]
    answer = player.turn(onward, session=f"{player.session}-fork")
    assert answer.reuse.reason == "hit"
    assert answer.token_ids == player.cold(onward).token_ids


def test_speculative_decoding_at_every_length(play):
    """Drafts leave slots behind the last token: wherever a turn ends, only blocks that were written for good are read."""
    args = ("--max-model-len", "4096", "--num-gpu-blocks-override", "400")
    args += ("--speculative-config", json.dumps(NGRAM))
    player = play(ClusterSpec(prepare_smollm2(), prefill_prefix_caching=False, engine_args=args))
    # A text that goes on as it began: what n-grams draft is mostly right.
    first = player.tokens("The ship passed the lighthouse at noon. " * 12)
    question = player.tokens(" In the evening the keeper")
    for length in range(2, BLOCK + 2):
        answer = player.turn(first, max_tokens=length)
        assert len(answer.token_ids) == length
        second = [*first, *answer.token_ids, *question]
        warm = player.turn(second, max_tokens=12)
        assert warm.token_ids == player.cold(second, max_tokens=12).token_ids, length
        assert warm.reuse.reason == "hit"
        # The last token's KV was never computed.
        assert warm.reuse.remote_tokens == (len(first) + length - 1) // BLOCK * BLOCK
    assert total(player.cluster.decode_urls, "vllm:spec_decode_num_accepted_tokens_total") > 100


SMALL_PREFILL = (
    *("--max-num-batched-tokens", "256"),
    *("--num-gpu-blocks-override", "64"),
    *("--max-model-len", "1920"),
    "--no-scheduler-reserve-full-isl",
)


def test_chunked_and_preempted_prefills_after_a_pull(play):
    """Prompts longer than a step, more of them than prefill has blocks for: each pulls once, and none hangs."""
    player = play(shape("llama", prefill_args=SMALL_PREFILL))
    check_turns(player, REUSED)
    firsts = [words(400, seed) for seed in range(6)]
    sessions = [f"{player.session}-{n}" for n in range(len(firsts))]
    answers = [player.turn(first, session=session) for first, session in zip(firsts, sessions, strict=True)]
    seconds = [
        [*first, *answer.token_ids, *words(600, 10 + n)]
        for n, (first, answer) in enumerate(zip(firsts, answers, strict=True))
    ]
    with ThreadPoolExecutor(len(seconds)) as pool:
        warm = list(pool.map(lambda n: player.turn(seconds[n], session=sessions[n]), range(len(seconds))))
    for second, answer in zip(seconds, warm, strict=True):
        assert answer.reuse.reason == "hit"
        assert answer.token_ids == player.cold(second).token_ids
    assert total(player.cluster.prefill_urls, "vllm:num_preemptions_total") > 0


def test_sliding_window_layers_are_refused(play):
    """Their out-of-window blocks are gone: nothing is reused, and every answer is right."""
    check_turns(play(shape("gemma3")), refused("unsupported"))


def test_sliding_window_layers_kept_whole_are_reused(play):
    """Without the hybrid KV cache manager all layers keep all blocks, as with full attention."""
    check_turns(play(shape("gemma3", "--disable-hybrid-kv-cache-manager")), REUSED)


def test_ranks_of_a_data_parallel_decode_engine(play):
    """Every rank retains for itself and is asked; the router learns all of them from one API port."""
    player = play(shape("llama", decode_args=("--data-parallel-size", "2")))
    check_turns(player, REUSED)
    sessions = [f"{player.session}-{n}" for n in range(4)]
    firsts = [words(200, 20 + n) for n in range(4)]
    with ThreadPoolExecutor(len(firsts)) as pool:
        answers = list(pool.map(lambda n: player.turn(firsts[n], session=sessions[n]), range(4)))
    for n, answer in enumerate(answers):
        second = [*firsts[n], *answer.token_ids, *words(20, 30 + n)]
        warm = player.turn(second, session=sessions[n])
        assert warm.reuse.reason == "hit"
        assert warm.token_ids == player.cold(second).token_ids
    for rank in (0, 1):
        label = f'engine="{rank}",finished_reason="length"'
        assert total(player.cluster.decode_urls, "vllm:request_success_total", label) > 0


def test_ranks_of_a_tensor_parallel_decode_engine(play):
    """One prefill rank reads the heads of two decode ranks, and believes both only together."""
    # Several ranks need the executor that starves engines on few cores: a tiny model and one thread each.
    args = ("--distributed-executor-backend", "mp", "--tensor-parallel-size", "2")
    check_turns(play(shape("llama", decode_args=args, engine_env={"OMP_NUM_THREADS": "1"})), REUSED)


def test_blocks_of_another_size_on_decode(play):
    """Nothing can be read in either direction: both engines compute, and say so."""
    check_turns(play(shape("llama", decode_args=("--block-size", "64"))), refused("incompatible"))


def test_a_threshold_that_is_learnt(play):
    """It starts from the default, is learnt from the pulls and prompts that happen, and changes no answer."""
    player = play(shape("llama", reuse=ReuseSettings(recompute_threshold="auto")))
    (prefill,) = player.cluster.prefill_urls
    assert "bidikv:pull_threshold_tokens{" not in readiness.fetch(f"{prefill}/metrics")
    prompt = words(200, 1)
    reasons = []
    for turn in range(10):
        answer = player.turn(prompt)
        assert answer.token_ids == player.cold(prompt).token_ids
        reasons.append(answer.reuse.reason)
        prompt = [*prompt, *answer.token_ids, *words(40 + 30 * turn, turn)]
    assert reasons[:3] == ["new_conversation", "hit", "hit"]
    # What it comes to is the machine's affair: a pull may or may not pay for a model of next to no size.
    assert set(reasons[3:]) <= {"hit", "below_threshold"}
    assert "bidikv:pull_threshold_tokens{" in readiness.fetch(f"{prefill}/metrics")
