"""TokenSpeed's service: both legs at once, which meet in a room that also decides their data-parallel rank."""

from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as service
from smg_grpc_servicer.pd_pairing import pairing_protocol_from_env

from engine import WINDOW


class Servicer(service.TokenSpeedSchedulerServicer):
    def __init__(self, core):
        self.core = core

    async def Generate(self, request, context):
        core, tokens = self.core, list(request.tokenized.input_ids)
        meeting = request.kv_bootstrap_info
        limit = 1 if core.role == "prefill" else request.sampling_params.max_new_tokens or len(tokens) + 1

        async def get_kv(stop):
            return await core.meet(meeting.bootstrap_host, meeting.bootstrap_port, meeting.bootstrap_room, tokens, stop)

        cached = 0 if core.role == "prefill" else len(tokens)

        def chunk(new, count):
            piece = pb.GenerateStreamChunk(token_ids=new, prompt_tokens=len(tokens), completion_tokens=count,
                                           cached_tokens=cached)
            return pb.GenerateResponse(request_id=request.request_id, chunk=piece)

        def complete(output, count, reason):
            end = pb.GenerateComplete(output_ids=output, finish_reason=reason, prompt_tokens=len(tokens),
                                      completion_tokens=count, cached_tokens=cached)
            return pb.GenerateResponse(request_id=request.request_id, complete=end)

        async for message in core.generate(context, request.request_id, tokens, get_kv, (chunk, complete),
                                           request.stream, limit):
            yield message

    async def HealthCheck(self, request, context):
        return pb.HealthCheckResponse(healthy=True, message="Health")

    async def Abort(self, request, context):
        known = self.core.abort(request.request_id)
        return pb.AbortResponse(success=known, message="" if known else f"Request {request.request_id} not found")

    async def GetModelInfo(self, request, context):
        core = self.core
        return pb.GetModelInfoResponse(
            model_path=core.model, served_model_name=core.model, max_context_length=WINDOW)

    async def GetServerInfo(self, request, context):
        core, arguments = self.core, Struct()
        arguments.update({
            "served_model_name": core.model, "disaggregation_mode": core.role, "kv_cache_dtype": "auto",
            "max_num_seqs": core.max_running, "pairing_protocol": pairing_protocol_from_env(),
        })
        return pb.GetServerInfoResponse(server_args=arguments, active_requests=len(core.inside),
                                        tokenspeed_version="0.4.0")

    async def GetLoads(self, request, context):
        load = pb.SchedulerLoad(num_running_reqs=len(self.core.inside), max_total_num_tokens=1 << 20,
                                max_running_requests=self.core.max_running)
        return pb.GetLoadsResponse(version="0.4.0", dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request, context):
        async for piece in self.core.tokenizer_pieces():
            yield piece

    async def FlushCache(self, request, context):
        return common.FlushCacheResponse(success=True, message="flushed")


def register(server, core):
    service.add_TokenSpeedSchedulerServicer_to_server(Servicer(core), server)
