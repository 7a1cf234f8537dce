"""The wire contract of other transfer systems, pinned against vLLM's own code: what our adapters send, it reads."""

import ast
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.contract

vllm = pytest.importorskip("vllm", reason="the contract is with an installed vLLM", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # noqa: E402
    mooncake_connector,
    mooncake_utils,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # noqa: E402
    base_scheduler,
    pull_scheduler,
    pull_worker,
    push_scheduler,
    push_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id  # noqa: E402
from vllm.entrypoints.openai.chat_completion import protocol as chat  # noqa: E402
from vllm.entrypoints.openai.completion import protocol as completion  # noqa: E402
from vllm.entrypoints.openai.completion import serving as completion_serving  # noqa: E402
from vllm.entrypoints.scale_out.render import api_router as render_router  # noqa: E402
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from bidikv_server.reasons import Reason  # noqa: E402
from bidikv_server.router.core.accounts import NOTHING_KNOWN, PrefillAnswer  # noqa: E402
from bidikv_server.router.core.decoded import read_decoded  # noqa: E402
from bidikv_server.router.core.handles import Handle, block_digests, first_blocks  # noqa: E402
from bidikv_server.router.transfer.bidirectional import rendered_tokens  # noqa: E402
from bidikv_server.router.transfer.lmcache import TAG, LMCacheTransfer  # noqa: E402
from bidikv_server.router.transfer.mooncake import MooncakeTransfer, parse_ranks  # noqa: E402
from bidikv_server.router.transfer.nixl import PullTransfer, PushTransfer  # noqa: E402

BLOCK = 16


def source(thing):
    return inspect.getsource(thing)


def request(params, tokens=40, status=RequestStatus.FINISHED_LENGTH_CAPPED):
    """As much of a vLLM request as connectors look at."""
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens,
        status=status,
    )


class Blocks:
    """Blocks that vLLM allocated for a request, none of them computed."""

    def __init__(self, count):
        self.blocks = ([SimpleNamespace(block_hash=None, is_null=False)] * count,)
        self._ids = (list(range(count)),)

    def get_unhashed_block_ids_all_groups(self):
        return self._ids


def scheduler(kind, **attributes):
    """The scheduler side of a stock connector, without an engine around it."""
    side = object.__new__(kind)
    side.__dict__.update(
        engine_id="engine",
        side_channel_host="10.0.0.1",
        side_channel_port=5600,
        use_host_buffer=False,
        kv_recompute_threshold=0,
        is_bidirectional_kv_xfer_enabled=False,
        decoder_kv_blocks_ttl=480,
        transfer_tp_size=1,
        _kv_lease_duration=30,
        _is_hma_required=False,
        _has_mamba=False,
        _bounded_replay=False,
        _reqs_in_batch=set(),
        _reqs_not_processed=set(),
        _reqs_need_recv={},
        _reqs_need_save={},
        _reqs_need_send={},
        _heartbeat_req_engine={},
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=1
            ),
            num_prefill_lookahead_tokens=0,
        ),
        kv_cache_config=SimpleNamespace(select_transfer_block_ids=lambda ids: ids),
    )
    side.__dict__.update(attributes)
    return side


def pull(**attributes):
    return scheduler(pull_scheduler.NixlPullConnectorScheduler, **attributes)


def push():
    return scheduler(
        push_scheduler.NixlPushConnectorScheduler,
        _push_pending_registrations={},
        _push_registration_deadlines={},
        _finished_request_blocks={},
        _newly_finished_push_blocks={},
        _push_registration_timeout=480.0,
    )


def on_the_wire(params):
    """As JSON makes it: keys and lists, no tuples."""
    return json.loads(json.dumps(params))


def prefilled(side, transfer):
    """What a stock prefill engine answers to the transfer's prefill leg, as the router reads it."""
    asked = request(on_the_wire(transfer.prefill.params))
    side.update_state_after_alloc(asked, Blocks(3), 0)
    keeps, params = side.request_finished(asked, ([5, 6, 7],))
    assert keeps
    answer = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": params}
    return transfer.read_prefill(json.dumps(answer).encode())


def test_pull():
    """Prefill keeps its blocks and decode, given the handle, fetches the whole prompt of them."""
    transfer = PullTransfer()
    asked = request(on_the_wire(transfer.decode(prefilled(pull(), transfer)).params))
    decode = pull()
    assert decode.get_num_new_matched_tokens(asked, 0) == (40, True)
    decode.update_state_after_alloc(asked, Blocks(3), 40)
    assert decode._reqs_need_recv["r"][1] == ([0, 1, 2],)
    assert asked.kv_transfer_params["remote_block_ids"] == [[5, 6, 7]]


def test_push():
    """Decode registers its own blocks with the engine that computes, and is told none of that one's."""
    transfer = PushTransfer({"X-Request-Id": "paired"})
    leg = transfer.decode(prefilled(push(), transfer))
    asked = request(on_the_wire(leg.params))
    decode = push()
    assert decode.get_num_new_matched_tokens(asked, 0) == (40, True)
    decode.update_state_after_alloc(asked, Blocks(3), 40)
    registration = decode._push_pending_registrations["r"]
    assert registration["local_block_ids"] == ([0, 1, 2],)
    assert (registration["remote_engine_id"], registration["remote_host"]) == ("engine", "10.0.0.1")
    assert (transfer.prefill.headers, leg.headers) == ({"X-Request-Id": "paired"},) * 2


def test_push_pairs_by_request_id_alone():
    """So an id that a client chose twice would mix two requests; ours, and what vLLM appends to it, cannot meet."""
    body = source(push_worker.NixlPushConnectorWorker._pop_matching_finished_blocks)
    assert "get_base_request_id(fin_id) == base_id" in body
    ours = f"the-clients-own-{'ab' * 16}"
    assert get_base_request_id(f"chatcmpl-{ours}-0123abcd") == f"chatcmpl-{ours}"
    assert get_base_request_id(f"chatcmpl-{ours}") == f"chatcmpl-{ours}"


def decoded():
    """What a stock bidirectional decode engine returns at the end of a turn of 40 tokens and an answer of 9."""
    decode = pull(is_bidirectional_kv_xfer_enabled=True)
    params = on_the_wire(
        {**PullTransfer().prefill.params, "do_remote_decode": False, "do_remote_prefill": True}
    )
    asked = request(params, status=RequestStatus.FINISHED_STOPPED)
    asked.num_computed_tokens = 48
    decode.update_state_after_alloc(asked, Blocks(0), 0)
    keeps, returned = decode.request_finished(asked, ([1, 2, 3, 4],))
    assert keeps
    answer = {
        "kv_transfer_params": returned,
        "prompt_token_ids": list(range(40)),
        "choices": [{"message": {"role": "assistant", "content": "x"}, "token_ids": list(range(9))}],
    }
    return read_decoded(json.dumps(answer).encode())


def test_bidirectional_handle():
    """What decode returns is read, and prefill fetches no more of it than its first proven blocks."""
    found = decoded()
    assert found is not None
    assert found.computed_tokens == 48
    blocks = block_digests(found.token_ids, BLOCK, 48)
    handle = Handle("http://d", found.params, BLOCK, blocks)
    asked = request(on_the_wire(first_blocks(handle, 2)), tokens=60)
    prefill = pull(is_bidirectional_kv_xfer_enabled=True)
    assert prefill.get_num_new_matched_tokens(asked, 0) == (2 * BLOCK, True)
    prefill.update_state_after_alloc(asked, Blocks(2), 2 * BLOCK)
    assert prefill._reqs_need_recv["r"][1] == ([0, 1],)
    assert asked.kv_transfer_params["remote_block_ids"] == [[1, 2]]


def test_prefill_that_is_not_bidirectional_waits_for_ever():
    """It says that it fetches and never does: why the router warns that all engines have to be bidirectional."""
    found = decoded()
    assert found is not None
    asked = request(on_the_wire({**found.params}), tokens=60)
    prefill = pull()
    assert prefill.get_num_new_matched_tokens(asked, 0)[1]
    prefill.update_state_after_alloc(asked, Blocks(3), 48)
    assert prefill._reqs_need_recv == {}


def test_decode_pins_for_any_parameters():
    """Why decode gets no parameters without a handle."""
    decode = pull(is_bidirectional_kv_xfer_enabled=True)
    keeps, _ = decode.request_finished(request({"x": 1}), ([1],))
    assert keeps


def test_decode_lease_is_fixed():
    """Handles live as long as decode's own time says, counted from the end of the turn, and prefill checks the clock."""
    assert '"decoder_kv_blocks_ttl", 480' in source(base_scheduler)
    assert "blocks_expiry_time" in source(pull_worker)


def test_streams_carry_no_handle():
    """The day they do, streamed turns can be read back too."""
    for stream in (chat.ChatCompletionStreamResponse, completion.CompletionStreamResponse):
        assert "kv_transfer_params" not in stream.model_fields
    for whole in (chat.ChatCompletionResponse, completion.CompletionResponse):
        assert "kv_transfer_params" in whole.model_fields


def test_token_ids_come_where_they_are_read():
    """With the answer of a chat, with the choice of a completion, and null where they were not asked for."""
    assert chat.ChatCompletionResponse.model_fields["prompt_token_ids"].default is None
    assert chat.ChatCompletionResponseChoice.model_fields["token_ids"].default is None
    assert {"prompt_token_ids", "token_ids"} <= set(completion.CompletionResponseChoice.model_fields)
    for asked in (chat.ChatCompletionRequest, completion.CompletionRequest):
        assert "return_token_ids" in asked.model_fields


def test_token_ids_change_an_answer_that_repeats_its_prompt():
    """Why they are not asked for then."""
    body = source(completion_serving.OpenAIServingCompletion.request_output_to_completion_response)
    assert re.search(r'if request.echo:\s+if request.return_token_ids:\s+prompt_text = ""', body)


def test_render():
    """Both endpoints exist, and answer with token ids under the name that is read."""
    paths = {route.path for route in render_router.router.routes}
    assert {"/v1/chat/completions/render", "/v1/completions/render"} <= paths
    answer = GenerateRequest(request_id="r", token_ids=[1, 2], sampling_params=SamplingParams())
    assert rendered_tokens(answer.model_dump_json().encode()) == [1, 2]
    assert rendered_tokens(b"[" + answer.model_dump_json().encode() + b"]") == [1, 2]


def test_prefill_takes_the_tokens_that_were_compared():
    """And not beside media."""
    assert 'kv_transfer_params.get("prompt_token_ids")' in source(
        chat.ChatCompletionRequest.drop_prompt_token_ids_with_media
    )


def mooncake(producer):
    side = scheduler(
        mooncake_connector.MooncakeConnectorScheduler,
        is_kv_producer=producer,
        is_kv_consumer=not producer,
        blocks_per_sw=[0],
        _reqs_need_send={},
    )
    side.get_sw_clipped_blocks = list
    return side


PARAMS = {"remote_engine_id": "e", "remote_bootstrap_addr": "http://p:8998", "transfer_id": "xfer-1"}


def test_mooncake_prefill_leg():
    """Prefill keeps its blocks under the transfer id, and answers nothing."""
    leg = MooncakeTransfer(PARAMS, None).prefill
    asked, prefill = request(on_the_wire(leg.params)), mooncake(producer=True)
    prefill.update_state_after_alloc(asked, Blocks(3), 0)
    assert prefill.request_finished(asked, ([5, 6, 7],)) == (True, None)
    sent = prefill.build_connector_meta(None).reqs_to_send
    assert sent == {"r": ("xfer-1", [[5, 6, 7]])}


def test_mooncake_keeps_only_what_ended_by_length():
    """Why prefill must not end at its first token, and why its finish reason is read."""
    leg = MooncakeTransfer(PARAMS, None).prefill
    assert leg.fields == {"min_tokens": 1}
    asked = request(on_the_wire(leg.params), status=RequestStatus.FINISHED_STOPPED)
    assert mooncake(producer=True).request_finished(asked, ([5],)) == (False, None)


def test_mooncake_decode_leg():
    """Decode asks the engine that the bootstrap server named, under the same transfer id."""
    leg = MooncakeTransfer(PARAMS, None).decode(NOTHING_KNOWN)
    asked, decode = request(on_the_wire(leg.params)), mooncake(producer=False)
    assert decode.get_num_new_matched_tokens(asked, 0) == (40, True)
    decode.update_state_after_alloc(asked, Blocks(3), 40)
    meta = decode.build_connector_meta(None).reqs_to_recv["e"]["r"]
    assert (meta.transfer_id, meta.remote_bootstrap_addr, meta.local_block_ids) == (
        "xfer-1",
        "http://p:8998",
        [[0, 1, 2]],
    )


def test_mooncake_bootstrap():
    """The router asks where decode asks, and reads what it answers; the address needs its scheme."""
    entry = mooncake_utils.EngineEntry(engine_id="e", worker_addr={0: {0: "tcp://h:1"}})
    raw = json.dumps({0: vars(entry)}).encode()
    assert parse_ranks(raw) == {0: "e"}
    assert 'url = remote_bootstrap_addr + "/query"' in source(mooncake_connector)
    assert 'self.app.get("/query"' in source(mooncake_utils.MooncakeBootstrapServer)
    assert re.search(r"VLLM_MOONCAKE_BOOTSTRAP_PORT.*8998", source(vllm.envs))


LMCACHE = Path(mooncake_connector.__file__).parents[1] / "lmcache_integration" / "vllm_v1_adapter.py"
"""VLLM's own adapter imports LMCache, which need not be installed."""


def of_lmcache(name):
    """One function of that adapter, without its decorators and types."""
    (found,) = (
        node
        for node in ast.walk(ast.parse(LMCACHE.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.decorator_list = []
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), found], [])
    space = {}
    exec(compile(ast.fix_missing_locations(module), LMCACHE, "exec"), space)  # noqa: S102
    return space[name]


def test_lmcache_tag():
    """The salt reaches LMCache's keys through parameters of this prefix, and through nothing else."""
    leg = LMCacheTransfer("s" * 32).prefill
    sampling = SamplingParams(extra_args={"kv_transfer_params": leg.params})
    assert of_lmcache("extract_request_configs")(sampling) == {TAG: "s" * 32}
    assert "cache_salt" not in LMCACHE.read_text(encoding="utf-8")


def test_lmcache_answers_nothing():
    """So there is nothing to hand to decode, and nothing that clashes with another child's answer."""
    leg = LMCacheTransfer("s" * 32).prefill
    assert of_lmcache("request_finished")(None, request(leg.params), [1]) == (False, None)


class Child:
    """One child of a MultiConnector."""

    def __init__(self, answer):
        self.answer = answer
        self.heard = None

    def request_finished(self, asked, _blocks):
        self.heard = asked.kv_transfer_params
        return False, self.answer


def test_multi_connector():
    """Parameters go to all children as they are, answers come merged, and two that answer alike are an error."""
    multi = object.__new__(MultiConnector)
    multi._requests_to_connector, multi._extra_async_saves = {}, {}
    multi._connectors = [Child({"remote_host": "h"}), Child(None), Child({})]
    asked = request({"do_remote_decode": True, TAG: "s"})
    assert multi.request_finished(asked, [1]) == (False, {"remote_host": "h"})
    assert all(child.heard == asked.kv_transfer_params for child in multi._connectors)
    multi._connectors = [Child({"remote_host": "h"}), Child({"remote_host": "i"})]
    with pytest.raises(RuntimeError, match="Key clash"):
        multi.request_finished(asked, [1])


def test_pull_hands_on_what_prefill_answered():
    """Any field that a later vLLM adds reaches decode too."""
    reuse = NOTHING_KNOWN.reuse
    assert reuse.reason == Reason.UNKNOWN
    assert PullTransfer().decode(PrefillAnswer({"new": 1}, reuse)).params == {"new": 1}
