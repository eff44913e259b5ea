"""TokenSpeed's service: both legs at once, which meet in a room that also decides their data-parallel rank."""

from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as service
from smg_grpc_servicer.pd_pairing import pairing_protocol_from_env

from engine import WINDOW
from together import Together


class Servicer(Together, service.TokenSpeedSchedulerServicer):
    pb = pb
    version = "0.4.0"

    @staticmethod
    def meeting_of(request):
        return request.kv_bootstrap_info

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
                                        tokenspeed_version=self.version)


def register(server, core):
    service.add_TokenSpeedSchedulerServicer_to_server(Servicer(core), server)
