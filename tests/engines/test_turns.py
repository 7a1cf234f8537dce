"""The correctness test of record: with reuse, every greedy answer equals a cold run's, token for token."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from bidikv_server.launch import readiness

from .conftest import BLOCK, STORY, Player, after, opening, sample

QUESTIONS = (
    "What was written into the book, and by whom? Tell me about the ships.",
    "Where did the ships come from? Name a country and describe its harbour.",
    "Why was the lamp lit every evening? Explain how a lighthouse helps at sea.",
)


def same_as_cold(player, messages, answer):
    cold = player.cold(messages)
    assert answer.token_ids, "nothing was generated"
    assert answer.token_ids == cold.token_ids
    return answer


def check_counts(reuse):
    assert reuse.remote_tokens % BLOCK == 0
    assert reuse.remote_tokens + reuse.local_tokens + reuse.computed_tokens == reuse.prompt_tokens


def test_faithful_turns(player):
    """Each turn extends the last: all whole blocks are pulled, among them tokens that decode generated."""
    messages = opening()
    answer = same_as_cold(player, messages, player.turn(messages, max_tokens=24))
    assert answer.reuse.reason == "new_conversation"
    generated_reused = 0
    for question in QUESTIONS:
        before = answer.reuse.prompt_tokens
        messages = after(messages, answer, question)
        answer = same_as_cold(player, messages, player.turn(messages))
        check_counts(answer.reuse)
        assert answer.reuse.reason == "hit"
        assert answer.reuse.remote_tokens >= before // BLOCK * BLOCK
        generated_reused += max(0, answer.reuse.remote_tokens - before)
    assert generated_reused > 0


def test_an_early_edit(player):
    """One word changed near the start: the cold answer, not the stale one, and only what precedes it is pulled."""
    messages = opening()
    answer = player.turn(messages)
    edited = opening(STORY.replace("lighthouse", "windmill", 1), times=5)
    messages = after(edited, answer, QUESTIONS[0])
    changed = same_as_cold(player, messages, player.turn(messages))
    check_counts(changed.reuse)
    assert changed.reuse.reason in {"diverged", "hit_diverged"}
    assert changed.reuse.remote_tokens <= 2 * BLOCK
    assert 0 <= changed.reuse.diverged_at_token - changed.reuse.remote_tokens < BLOCK


def test_a_late_edit(player):
    """The answer was edited before it was sent back: everything before it is still pulled."""
    messages = opening()
    answer = player.turn(messages)
    prompt = answer.reuse.prompt_tokens
    messages = [
        *messages,
        {"role": "assistant", "content": "Nothing at all."},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    changed = same_as_cold(player, messages, player.turn(messages))
    check_counts(changed.reuse)
    assert changed.reuse.reason == "hit_diverged"
    assert changed.reuse.remote_tokens == prompt // BLOCK * BLOCK
    # The first token that was generated is the first that is not the client's.
    assert changed.reuse.diverged_at_token == prompt


def test_a_truncated_history(player):
    """Rewound to an earlier turn and asked otherwise: the shorter history is reused, nothing after it."""
    first = opening()
    answer = player.turn(first)
    second = after(first, answer, QUESTIONS[0])
    player.turn(second)
    rewound = after(first, answer, QUESTIONS[2])
    shorter = same_as_cold(player, rewound, player.turn(rewound))
    check_counts(shorter.reuse)
    assert shorter.reuse.reason in {"hit", "hit_diverged"}
    assert shorter.reuse.remote_tokens >= answer.reuse.prompt_tokens // BLOCK * BLOCK


def test_regenerating(player):
    """The same request again is a retry: it reads the same blocks and gives the same answer."""
    messages = opening()
    answer = player.turn(messages)
    second = after(messages, answer, QUESTIONS[0])
    once = player.turn(second)
    again = same_as_cold(player, second, player.turn(second))
    assert once.token_ids == again.token_ids
    assert again.reuse.reason == "hit"
    assert again.reuse.remote_tokens >= once.reuse.remote_tokens


def test_forks_at_once(player):
    """Two continuations of one history, asked at the same time, read the same blocks; each gets its own answer."""
    messages = opening()
    answer = player.turn(messages)
    forks = [after(messages, answer, question) for question in QUESTIONS]
    with ThreadPoolExecutor(len(forks)) as pool:
        answers = list(pool.map(player.turn, forks))
    for fork, branch in zip(forks, answers, strict=True):
        check_counts(branch.reuse)
        assert branch.reuse.reason == "hit"
        # A batch of another shape may flip a near tie; these questions have clear answers.
        assert branch.token_ids == player.cold(fork).token_ids


def test_a_turn_that_met_a_stop_string(player):
    """VLLM aborts it in the engine; its blocks are kept all the same, and the cut answer extends them."""
    messages = opening()
    whole = player.turn(messages)
    stop = whole.text[len(whole.text) // 2 :][:6]
    other = Player(player.cluster)
    try:
        cut = other.turn(messages, stop=[stop])
        assert stop not in cut.text
        assert len(cut.token_ids) < len(whole.token_ids)
        messages = after(messages, cut, QUESTIONS[0])
        # The engine hears of the stop after the client has its answer; it has by the end of another request.
        cold = other.cold(messages)
        late = other.turn(messages)
    finally:
        other.close()
    assert late.token_ids == cold.token_ids
    assert late.reuse.reason in {"hit", "hit_diverged"}
    assert late.reuse.remote_tokens >= cut.reuse.prompt_tokens // BLOCK * BLOCK


def test_an_expired_entry(player):
    """After its TTL a turn's blocks are not offered, and the turn is computed anew."""
    messages = opening()
    answer = player.turn(messages, headers={"x-bidikv-turn": "v=1, ret=0.001"})
    messages = after(messages, answer, QUESTIONS[0])
    late = same_as_cold(player, messages, player.turn(messages))
    assert (late.reuse.reason, late.reuse.remote_tokens) == ("expired", 0)
    # What was computed anew is retained anew.
    messages = after(messages, late, QUESTIONS[1])
    assert same_as_cold(player, messages, player.turn(messages)).reuse.reason == "hit"


def flood(player):
    """Other conversations' traffic: more tokens than decode has blocks for."""
    for number in range(2):
        filler = opening(f"Number {number} is a number. " + STORY, times=72)
        player.turn(filler, session=f"filler-{number}", max_tokens=2)


def test_blocks_that_were_handed_out(player):
    """Decode gives retained blocks to running requests; the next turn says so and computes."""
    messages = opening()
    answer = player.turn(messages)
    flood(player)
    messages = after(messages, answer, QUESTIONS[0])
    later = same_as_cold(player, messages, player.turn(messages))
    assert later.reuse.reason in {"evicted", "hit_evicted"}
    assert later.reuse.remote_tokens < answer.reuse.prompt_tokens // BLOCK * BLOCK


def test_a_promise_to_come_back_is_kept(player):
    """Traffic that takes every other block leaves those of a conversation that said when it comes back."""
    messages = opening()
    answer = player.turn(messages, headers={"x-bidikv-turn": "v=1, ret=300"})
    flood(player)
    messages = after(messages, answer, QUESTIONS[0])
    assert same_as_cold(player, messages, player.turn(messages)).reuse.reason == "hit"


def test_a_promise_never_holds_up_a_request(player):
    """A request that needs protected blocks gets them: nothing waits, and the promise is the loss."""
    player.turn(opening(times=30), headers={"x-bidikv-turn": "v=1, ret=300"}, max_tokens=2)
    longest = opening("Number nine is a number. " + STORY, times=72)
    answer = player.turn(longest, session=f"{player.session}-long", max_tokens=2)
    assert answer.reuse.prompt_tokens > 3000


def test_a_final_turn_leaves_nothing(player):
    """After the conversation's end its blocks are not offered."""
    messages = opening()
    answer = player.turn(messages)
    second = after(messages, answer, QUESTIONS[0])
    player.turn(second, headers={"x-bidikv-turn": "v=1, final"})
    late = same_as_cold(player, second, player.turn(second))
    assert (late.reuse.reason, late.reuse.remote_tokens) == ("released", 0)


def test_retention_costs_no_block(player, cluster):
    """Retained blocks count as free on decode, and prefill keeps nothing."""
    answer = player.turn(opening())
    assert answer.reuse.reason == "new_conversation"
    for url in (*cluster.decode_urls, *cluster.prefill_urls):
        exposition = readiness.fetch(f"{url}/metrics")
        assert "vllm:kv_cache_usage_perc{" in exposition
        assert sample(exposition, "vllm:kv_cache_usage_perc") == 0.0


@pytest.mark.parametrize("junk", [{"do_remote_prefill": True}, {"x": 1}, {"bidikv": {"v": 1}}, "text", 7])
def test_clients_cannot_reach_the_transfer_layer(player, junk):
    """`kv_transfer_params` of a client never arrive at an engine."""
    messages = opening(times=1)
    answer = same_as_cold(player, messages, player.turn(messages, kv_transfer_params=junk))
    assert answer.reuse.reason == "new_conversation"


def test_another_sessions_history_gives_nothing_wrong(player):
    """A second session with the same opening is its own conversation, with the same answer."""
    messages = opening()
    first = player.turn(messages)
    other = player.turn(messages, session=f"{player.session}-other")
    assert other.token_ids == first.token_ids


def test_with_prefills_own_cache(caching_player):
    """Local hits and readback together: only missing blocks move, and answers stay the same."""
    player = caching_player
    messages = opening()
    answer = same_as_cold(player, messages, player.turn(messages, max_tokens=24))
    for question in QUESTIONS:
        messages = after(messages, answer, question)
        answer = same_as_cold(player, messages, player.turn(messages))
        check_counts(answer.reuse)
        assert answer.reuse.reason == "local"
        assert answer.reuse.local_tokens > 0


def test_readback_beyond_a_local_hit(caching_player):
    """A long answer is worth a transfer: prefill has the old prompt, decode what it generated since."""
    player = caching_player
    messages = opening()
    answer = player.turn(messages, max_tokens=160)
    assert len(answer.token_ids) > 128, "the model stopped early; ask for something longer"
    messages = after(messages, answer, QUESTIONS[0])
    warm = same_as_cold(player, messages, player.turn(messages))
    check_counts(warm.reuse)
    assert warm.reuse.reason in {"hit", "hit_diverged"}
    assert warm.reuse.local_tokens > 0
    assert warm.reuse.remote_tokens >= 64
