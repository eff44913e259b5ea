"""vLLM's service: prefill first; its answer, or the gateway, tells the decode engine where the KV is."""

import json

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as service
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_servicer.pd_pairing import pairing_protocol_from_env

from engine import WINDOW
from transfer import fetch

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Servicer(service.VllmEngineServicer):
    def __init__(self, core):
        self.core = core

    async def Generate(self, request, context):
        core, tokens = self.core, list(request.tokenized.input_ids)
        handoff = json.loads(request.kv_transfer_params_json or "{}")
        limit = request.sampling_params.max_tokens or len(tokens) + 1
        handed_over = {}

        async def get_kv(stop):
            if handoff.get("do_remote_decode"):
                key = handoff.get("transfer_id") or request.request_id
                core.ledger.offer(key, tokens)
                if core.connector == "NixlConnector":
                    handed_over.update({
                        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": core.engine_id,
                        "remote_request_id": request.request_id, "remote_block_ids": [[1]],
                        "remote_host": "127.0.0.1", "remote_port": core.kv_port, "tp_size": 1,
                    })
                return tokens
            if handoff.get("do_remote_prefill"):
                if "transfer_id" in handoff:
                    host, port = handoff["remote_bootstrap_addr"].removeprefix("http://").rsplit(":", 1)
                    return await core.unless_aborted(stop, fetch(host, int(port), handoff["transfer_id"]))
                source = handoff["remote_host"], handoff["remote_port"], handoff["remote_request_id"]
                return await core.unless_aborted(stop, fetch(*source))
            return tokens

        cached = len(tokens) if handoff.get("do_remote_prefill") else 0

        def chunk(new, _count):
            piece = pb.GenerateStreamChunk(token_ids=new, prompt_tokens=len(tokens), completion_tokens=len(new),
                                           cached_tokens=cached)
            return pb.GenerateResponse(chunk=piece)

        def complete(output, _count, reason):
            end = pb.GenerateComplete(output_ids=output, finish_reason=reason, prompt_tokens=len(tokens),
                                      completion_tokens=len(output), cached_tokens=cached)
            if handed_over:
                end.kv_transfer_params_json = json.dumps(handed_over)
                end.kv_transfer_params.remote_host = handed_over["remote_host"]
                end.kv_transfer_params.remote_port = handed_over["remote_port"]
            return pb.GenerateResponse(complete=end)

        async for message in core.generate(context, request.request_id, tokens, get_kv, (chunk, complete),
                                           request.stream, limit):
            yield message

    async def HealthCheck(self, request, context):
        return pb.HealthCheckResponse(healthy=True, message="Health")

    async def Abort(self, request, context):
        for request_id in request.request_ids:
            self.core.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, request, context):
        core = self.core
        return pb.GetModelInfoResponse(
            model_path=core.model, served_model_name=core.model, is_generation=True, max_context_length=WINDOW)

    async def GetServerInfo(self, request, context):
        core = self.core
        return pb.GetServerInfoResponse(
            active_requests=len(core.inside), server_type="vllm-grpc", kv_connector=core.connector,
            kv_role=ROLES[core.role], kv_engine_id=core.engine_id, data_parallel_size=1, kv_cache_dtype="auto",
            block_size=16, model_dtype="torch.float32", max_num_seqs=core.max_running,
            pairing_protocol=pairing_protocol_from_env())

    async def GetLoads(self, request, context):
        load = pb.SchedulerLoad(num_running_reqs=len(self.core.inside), max_total_num_tokens=1 << 20,
                                max_running_requests=self.core.max_running)
        return pb.GetLoadsResponse(version="0.32.0", dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request, context):
        async for piece in self.core.tokenizer_pieces():
            yield piece

    async def FlushCache(self, request, context):
        return common.FlushCacheResponse(success=True, message="flushed")


def register(server, core):
    service.add_VllmEngineServicer_to_server(Servicer(core), server)
