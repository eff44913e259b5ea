"""What the services of SGLang and TokenSpeed have in common: both legs at once, which meet in a room of the prefill engine."""

from smg_grpc_proto.generated import common_pb2 as common


class Together:
    """Beside a generated servicer. `pb` = the engine's messages, `version` = what it calls itself, `meeting_of` = a request's room."""

    def __init__(self, core):
        self.core = core

    async def Generate(self, request, context):
        core, pb, tokens = self.core, self.pb, list(request.tokenized.input_ids)
        meeting = self.meeting_of(request)
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
        return self.pb.HealthCheckResponse(healthy=True, message="Health")

    async def Abort(self, request, context):
        known = self.core.abort(request.request_id)
        return self.pb.AbortResponse(success=known, message="" if known else f"Request {request.request_id} not found")

    async def GetLoads(self, request, context):
        load = self.pb.SchedulerLoad(num_running_reqs=len(self.core.inside), max_total_num_tokens=1 << 20,
                                     max_running_requests=self.core.max_running)
        return self.pb.GetLoadsResponse(version=self.version, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request, context):
        async for piece in self.core.tokenizer_pieces():
            yield piece

    async def FlushCache(self, request, context):
        return common.FlushCacheResponse(success=True, message="flushed")
