"""The connector's settings: defaults, and errors that name the key."""

import pytest

from bidikv_server.connector.config import ConnectorConfig, ConnectorConfigError
from bidikv_server.connector.requests import attention_objection, fence_objection, parallel_objection


def test_defaults():
    """What a role alone gives."""
    config = ConnectorConfig.parse({"bidikv": {"role": "decode"}})
    assert (config.decoder_kv_blocks_ttl, config.kv_recompute_threshold) == (480.0, 64)
    assert config.readback
    assert config.index_address(0) == "127.0.0.1:6800"
    assert config.index_address(3) == "127.0.0.1:6803"


def test_follows_vllms_own_keys():
    """TTL and threshold keep vLLM's names and place."""
    config = ConnectorConfig.parse(
        {
            "bidikv": {"role": "decode"},
            "decoder_kv_blocks_ttl": 5,
            "kv_recompute_threshold": 0,
            "backends": ["UCX"],
        }
    )
    assert (config.decoder_kv_blocks_ttl, config.kv_recompute_threshold) == (5.0, 0)


def test_advertises_ipv6_in_brackets():
    """An IPv6 host and its port can be told apart."""
    config = ConnectorConfig.parse(
        {"bidikv": {"role": "decode", "index_host": "::", "index_advertise": "fd00::1"}}
    )
    assert config.index_address(0) == "[fd00::1]:6800"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "bidikv engine"),
        ({"bidikv": []}, "bidikv engine"),
        ({"bidikv": {}}, r"bidikv\.role"),
        ({"bidikv": {"role": "both"}}, r"bidikv\.role"),
        ({"bidikv": {"role": "decode", "indx_port": 1}}, r"bidikv\.indx_port"),
        ({"bidikv": {"role": "decode", "index_port": 70000}}, r"bidikv\.index_port"),
        ({"bidikv": {"role": "decode", "secret": "x"}}, "BIDIKV_SECRET"),
        ({"bidikv": {"role": "decode"}, "decoder_kv_blocks_ttl": -1}, r"config\.decoder_kv_blocks_ttl"),
        ({"bidikv": {"role": "prefill"}, "kv_recompute_threshold": -1}, r"config\.kv_recompute_threshold:"),
        (
            {"bidikv": {"role": "prefill"}, "kv_recompute_threshold": "auto"},
            r"config\.kv_recompute_threshold:",
        ),
    ],
)
def test_errors_name_the_key(extra, message):
    """A wrong setting ends with one message that says which."""
    with pytest.raises(ConnectorConfigError, match=message):
        ConnectorConfig.parse(extra)


def test_the_secret_is_not_shown():
    """A configuration that is logged does not give the secret away."""
    config = ConnectorConfig.parse({"bidikv": {"role": "decode"}}, secret="hunter2")
    assert "hunter2" not in repr(config)
    assert config.secret.get_secret_value() == "hunter2"


class Transfer:
    """The attributes of vLLM's configuration that the fence depends on."""

    def __init__(self, *, consumer, batches):
        self.kv_transfer_config = self
        self.is_kv_consumer = consumer
        self.max_concurrent_batches = batches


@pytest.mark.parametrize(
    ("consumer", "batches", "safe"), [(True, 2, True), (True, 1, True), (False, 1, True), (False, 2, False)]
)
def test_pulls_need_vllms_fence(consumer, batches, safe):
    """A mere producer with steps that overlap would hand out blocks that are still being written."""
    objection = fence_objection(Transfer(consumer=consumer, batches=batches))
    assert (objection is None) == safe
    assert safe or "kv_both" in objection


@pytest.mark.parametrize(("dcp", "pcp", "safe"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_context_parallelism_is_refused(dcp, pcp, safe):
    """A block id then names another rank's tokens."""
    config = Transfer(consumer=True, batches=1)
    config.parallel_config = config
    config.decode_context_parallel_size, config.prefill_context_parallel_size = dcp, pcp
    assert (parallel_objection(config) is None) == safe


@pytest.mark.parametrize(
    ("on_cpu", "latent", "safe"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_latent_attention_is_refused_on_cpu(on_cpu, latent, safe):
    """There even vLLM itself takes prefix caching away from it."""
    config = Transfer(consumer=True, batches=1)
    config.model_config = config
    config.use_mla = latent
    assert (attention_objection(config, on_cpu=on_cpu) is None) == safe
