"""SGLang's service: both legs at once, which meet in a bootstrap room of the prefill engine."""

from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as service
from smg_grpc_servicer.pd_pairing import pairing_protocol_from_env

from engine import WINDOW
from together import Together


class Servicer(Together, service.SglangSchedulerServicer):
    pb = pb
    version = "0.5.23"

    @staticmethod
    def meeting_of(request):
        return request.disaggregated_params

    async def GetModelInfo(self, request, context):
        core = self.core
        return pb.GetModelInfoResponse(
            model_path=core.model, served_model_name=core.model, is_generation=True, max_context_length=WINDOW)

    async def GetServerInfo(self, request, context):
        core, arguments = self.core, Struct()
        arguments.update({
            "served_model_name": core.model, "disaggregation_mode": core.role, "kv_cache_dtype": "auto",
            "disaggregation_transfer_backend": "mooncake", "page_size": 1, "max_running_requests": core.max_running,
            "pairing_protocol": pairing_protocol_from_env(),
        })
        return pb.GetServerInfoResponse(server_args=arguments, active_requests=len(core.inside), server_type="grpc",
                                        sglang_version=self.version)


def register(server, core):
    service.add_SglangSchedulerServicer_to_server(Servicer(core), server)
