//! The admin API over gRPC: `smg.admin.v1.Admin`, with the standard health and reflection services beside it.
//!
//! * Each call is judged as the request to REST that does the same: one table ([`as_rest`]) says which that is, so that no role means two things.
//! * Errors carry the codes of REST in metadata.
//! * Health is for everybody: `SERVING` while this member's store works and hears a leader. Reflection tells nothing but this schema.

use std::pin::Pin;
use std::str::FromStr;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request as HttpRequest, State as Shared};
use axum::http::header;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response as HttpResponse;
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use smg_fleet::matrix::Query;
use smg_fleet::worker::WorkerPatch;
use smg_fleet::{AdminToken, ClusterSettings, Role, Worker, WorkerId, WorkerSpec, access, wire};
use smg_messages::state;
use smg_net::mutual::identity::Caller;
use smg_services::admin as pb;
use smg_services::admin::admin_server::{Admin, AdminServer};
use smg_state::codec;
use smg_store::cluster::MemberChange;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Response, Status};
use uuid::Uuid;

use super::access::{Identity, challenge, identify};
use super::admission;
use super::error::ApiError;
use super::service::backup::Backup;
use super::service::watch::{Batch, Followed, Object, Resume};
use super::service::{Call, Change, Consistency, Service};
use crate::sync::everywhere::{Everywhere, Seen};

/// Bytes of one part of a backup.
const PART: usize = 64 * 1024;
/// How often it is looked whether this member can serve.
const LOOK: Duration = Duration::from_secs(1);
/// Records of an answer, unless it is told another number.
const RECORDS: u32 = 100;

/// The request to REST that a call stands for.
pub(super) fn as_rest(method: &str) -> Option<(&'static str, &'static str)> {
    Some(match method {
        "ListWorkers" | "GetWorker" => ("GET", "/workers"),
        "CreateWorker" | "ReplaceWorker" | "PatchWorker" | "SetWorkerIntent" | "RemoveWorker" => ("POST", "/workers"),
        "ListPolicies" | "GetPolicy" => ("GET", "/fleet/policies"),
        "PutPolicy" | "DeletePolicy" => ("PUT", "/fleet/policies"),
        "GetSettings" => ("GET", "/fleet/settings"),
        "PutSettings" => ("PUT", "/fleet/settings"),
        "GetPairing" => ("GET", "/fleet/pairing"),
        "ExplainPairing" => ("POST", "/fleet/pairing/explain"),
        "ListGateways" => ("GET", "/fleet/gateways"),
        "GetAdmission" => ("GET", "/fleet/admission"),
        "GetCluster" => ("GET", "/fleet/cluster"),
        "ChangeMembers" => ("POST", "/fleet/cluster"),
        "ListTokens" => ("GET", "/fleet/tokens"),
        "CreateToken" | "RevokeToken" => ("POST", "/fleet/tokens"),
        "WhoAmI" => ("GET", "/fleet/whoami"),
        "ListAudit" => ("GET", "/fleet/audit"),
        // What is watched decides; see `watch`.
        "Watch" => ("GET", "/workers"),
        "Backup" => ("GET", "/fleet/backup"),
        _ => return None,
    })
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        let (status, name) = error.status_and_code();
        let code = match status.as_u16() {
            400 => Code::InvalidArgument,
            401 => Code::Unauthenticated,
            403 => Code::PermissionDenied,
            404 => Code::NotFound,
            409 if name.ends_with("ALREADY_EXISTS") || name == "ALREADY_HAPPENED" => Code::AlreadyExists,
            409 => Code::FailedPrecondition,
            412 => Code::Aborted,
            413 => Code::ResourceExhausted,
            503 if name == "OUTCOME_UNKNOWN" => Code::Unknown,
            503 => Code::Unavailable,
            _ => Code::Internal,
        };
        let mut answer = Status::new(code, error.to_string());
        answer.metadata_mut().insert("smg-code", MetadataValue::from_static(name));
        answer.metadata_mut().insert("smg-outcome", MetadataValue::from_static(error.fate().as_str()));
        answer
    }
}

/// The services as routes.
pub(crate) fn router(service: Service, max_body_bytes: usize, shutdown: CancellationToken) -> Router {
    let (reporter, health) = tonic_health::server::health_reporter();
    smg_net::spawn("grpc-health", report(service.clone(), reporter, shutdown));
    let server = AdminServer::new(Rpc { service: service.clone() }).max_decoding_message_size(max_body_bytes);
    let admin = Router::new()
        .route_service("/smg.admin.v1.Admin/{*method}", server)
        .layer(from_fn_with_state(service, authenticate));
    let mut router = admin.route_service("/grpc.health.v1.Health/{*method}", health);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(smg_services::ADMIN_DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    match (reflection().build_v1(), reflection().build_v1alpha()) {
        (Ok(newest), Ok(older)) => {
            router = router
                .route_service("/grpc.reflection.v1.ServerReflection/{*method}", newest)
                .route_service("/grpc.reflection.v1alpha.ServerReflection/{*method}", older);
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::error!(target: "smg", %error, "gRPC reflection is not available");
        }
    }
    router
}

/// Says whether this member can serve, for as long as the process runs.
async fn report(service: Service, reporter: tonic_health::server::HealthReporter, shutdown: CancellationToken) {
    let store = service.writer.store();
    loop {
        let ending = shutdown.is_cancelled();
        let serves = !ending && store.in_contact() && store.failure().borrow().is_none();
        let status = match serves {
            true => tonic_health::ServingStatus::Serving,
            false => tonic_health::ServingStatus::NotServing,
        };
        for name in ["", "smg.admin.v1.Admin", "smg.sync.v1.Sync"] {
            reporter.set_service_status(name, status).await;
        }
        if ending {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = shutdown.cancelled() => {}
        }
    }
}

/// Refuses whoever may not make a call, and says to the service who may.
async fn authenticate(Shared(service): Shared<Service>, mut request: HttpRequest, next: Next) -> HttpResponse {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default();
    let Some((rest, path)) = as_rest(method) else { return next.run(request).await };
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let caller = request.extensions().get::<Caller>();
    let judged = identify(&service, authorization.and_then(access::bearer), caller);
    match judged.and_then(|identity| identity.at_least(Role::required(rest, path))) {
        Ok(identity) => {
            request.extensions_mut().insert(identity);
            next.run(request).await
        }
        Err(denied) => {
            tracing::warn!(target: "smg::audit", method, reason = %denied, "an admin call was refused");
            let mut response = Status::from(ApiError::Denied(denied)).into_http::<axum::body::Body>();
            if let Some(challenge) = challenge(denied) {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
            }
            response
        }
    }
}

/// The service.
struct Rpc {
    service: Service,
}

type Answer<T> = Result<Response<T>, Status>;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn consistency(stale: bool) -> Consistency {
    if stale { Consistency::Stale } else { Consistency::Linearizable }
}

fn invalid(error: impl std::fmt::Display) -> Status {
    ApiError::BadRequest(error.to_string()).into()
}

fn required<T>(value: Option<T>, name: &str) -> Result<T, Status> {
    value.ok_or_else(|| invalid(format!("'{name}' is missing")))
}

fn worker_id(text: &str) -> Result<WorkerId, Status> {
    WorkerId::from_str(text).map_err(|_| invalid("a worker id is a UUID"))
}

fn uuid(text: &str) -> Result<Uuid, Status> {
    Uuid::parse_str(text).map_err(|_| invalid("an id is a UUID"))
}

fn spec(spec: Option<state::WorkerSpec>) -> Result<WorkerSpec, Status> {
    wire::spec_from_pb(required(spec, "spec")?).map_err(invalid)
}

/// Who asks for a change, and how. The key alone does not make two calls the same: their messages must be the same too.
fn call<M: prost::Message>(
    request: &Request<M>,
    method: &str,
    options: Option<&pb::ChangeOptions>,
) -> Result<Call, Status> {
    let options = options.cloned().unwrap_or_default();
    let command_id = match options.idempotency_key.as_str() {
        "" => None,
        key => {
            let mut asked = method.as_bytes().to_vec();
            asked.extend(request.get_ref().encode_to_vec());
            Some(Uuid::from_u128(uuid(key)?.as_u128() ^ u128::from(wire::checksum(&asked))))
        }
    };
    let identity = request.extensions().get::<Identity>();
    Ok(Call {
        actor: identity.map_or_else(|| "admin-api".to_owned(), Identity::actor),
        command_id,
        expected_revision: options.expected_revision,
        dry_run: options.dry_run,
    })
}

/// A worker as others may see it.
fn shown_worker(worker: &Worker) -> state::Worker {
    let mut shown = wire::worker_to_pb(worker);
    for spec in shown.spec.iter_mut().chain(shown.job.iter_mut().filter_map(|job| job.proposed.as_mut())) {
        spec.api_key = None;
    }
    shown
}

/// A token as others may see it.
fn shown_token(token: &AdminToken) -> state::AdminToken {
    state::AdminToken { sha256: Vec::new(), ..wire::token_to_pb(token) }
}

fn shown_gateway(seen: &Seen) -> pb::Gateway {
    let record = &seen.record;
    let refused = record.nack.as_ref();
    pb::Gateway {
        gateway_id: record.gateway_id.clone(),
        process_id: record.process_id.clone(),
        version: record.version.clone(),
        connected: record.connected,
        connected_at_unix_ms: record.connected_at_unix_ms,
        last_seen_unix_ms: record.last_seen_unix_ms,
        acked_revision: record.acked_revision,
        in_flight_requests: record.in_flight_requests,
        refused_revision: refused.map_or(0, |refused| refused.revision),
        refused_reason: refused.map(|refused| refused.reason.clone()).unwrap_or_default(),
        member: seen.member,
    }
}

fn shown_settings(settings: &ClusterSettings) -> state::ClusterSettings {
    state::ClusterSettings { name: settings.name.clone() }
}

fn changed(change: &Change, object: Option<pb::change_response::Object>) -> Answer<pb::ChangeResponse> {
    Ok(Response::new(pb::ChangeResponse { revision: change.outcome.revision, dry_run: change.dry_run, object }))
}

fn changed_worker(change: &Change, id: WorkerId) -> Answer<pb::ChangeResponse> {
    let worker = change.state.worker(id).map(|worker| pb::change_response::Object::Worker(shown_worker(worker)));
    changed(change, worker)
}

fn query(of: &pb::PairingRequest) -> Result<Query, Status> {
    let text = |name: &str, value: &str| (!value.is_empty()).then(|| (name.to_owned(), value.to_owned()));
    let (pairs, limit) = (of.pairs.map(|pairs| pairs.to_string()), of.limit.map(|limit| limit.to_string()));
    let offset = of.offset.to_string();
    let given = [
        text("model", &of.model),
        text("prefill", &of.prefill),
        text("decode", &of.decode),
        text("pairs", &pairs.unwrap_or_default()),
        text("limit", &limit.unwrap_or_default()),
        text("offset", &offset),
    ];
    Query::parse(given.into_iter().flatten()).map_err(invalid)
}

fn json(revision: u64, answer: &impl serde::Serialize) -> Answer<pb::PairingResponse> {
    let json = serde_json::to_string(answer).map_err(|error| Status::internal(error.to_string()))?;
    Ok(Response::new(pb::PairingResponse { revision, json }))
}

fn step(batch: Batch) -> pb::WatchResponse {
    let mut step = pb::WatchResponse {
        revision: batch.revision,
        history_id: batch.history_id.to_string(),
        deleted: batch.deleted,
        end: batch.end.unwrap_or_default().to_owned(),
        ..pb::WatchResponse::default()
    };
    for object in batch.put {
        match object {
            Object::Worker(worker) => step.workers.push(shown_worker(&worker)),
            Object::Policy(record) => step.policies.push(wire::record_to_pb(&record)),
            Object::Token(token) => step.tokens.push(shown_token(&token)),
            Object::Gateway(record) => step.gateways.push(shown_gateway(&record)),
        }
    }
    step
}

#[tonic::async_trait]
impl Admin for Rpc {
    type WatchStream = Answers<pb::WatchResponse>;
    type BackupStream = Answers<pb::BackupPart>;

    async fn list_workers(&self, request: Request<pb::ListWorkersRequest>) -> Answer<pb::ListWorkersResponse> {
        let pb::ListWorkersRequest { stale, model } = request.into_inner();
        let model = Some(model.as_str()).filter(|model| !model.is_empty());
        let (state, workers) = self.service.list_workers(consistency(stale), model).await?;
        let workers = workers.iter().map(|worker| shown_worker(worker)).collect();
        Ok(Response::new(pb::ListWorkersResponse { revision: state.revision(), workers }))
    }

    async fn get_worker(&self, request: Request<pb::GetWorkerRequest>) -> Answer<pb::GetWorkerResponse> {
        let pb::GetWorkerRequest { stale, id } = request.into_inner();
        let (state, found) = self.service.occupation(consistency(stale), worker_id(&id)?).await?;
        Ok(Response::new(pb::GetWorkerResponse {
            revision: state.revision(),
            worker: Some(shown_worker(&found.worker)),
            idle: found.is_idle(),
            busy_gateways: found.busy_gateways,
            unheard_members: found.unheard_members,
        }))
    }

    async fn create_worker(&self, request: Request<pb::CreateWorkerRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "CreateWorker", request.get_ref().options.as_ref())?;
        let (change, id, _) = self.service.create_worker(call, spec(request.into_inner().spec)?).await?;
        changed_worker(&change, id)
    }

    async fn replace_worker(&self, request: Request<pb::ReplaceWorkerRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "ReplaceWorker", request.get_ref().options.as_ref())?;
        let request = request.into_inner();
        let id = worker_id(&request.id)?;
        let change = self.service.replace_worker(call, id, spec(request.spec)?).await?;
        changed_worker(&change, id)
    }

    async fn patch_worker(&self, request: Request<pb::PatchWorkerRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "PatchWorker", request.get_ref().options.as_ref())?;
        let request = request.into_inner();
        let id = worker_id(&request.id)?;
        let patch = WorkerPatch {
            priority: request.priority,
            cost: request.cost,
            labels: request.labels.into_iter().collect(),
            api_key: request.api_key.map(Into::into),
            health: wire::health_override_from_pb(request.health),
        };
        let change = self.service.patch_worker(call, id, patch).await?;
        changed_worker(&change, id)
    }

    async fn set_worker_intent(&self, request: Request<pb::SetWorkerIntentRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "SetWorkerIntent", request.get_ref().options.as_ref())?;
        let request = request.into_inner();
        let id = worker_id(&request.id)?;
        let intent = wire::intent(request.intent).map_err(invalid)?;
        let change = self.service.set_intent(call, id, intent).await?;
        changed_worker(&change, id)
    }

    async fn remove_worker(&self, request: Request<pb::RemoveWorkerRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "RemoveWorker", request.get_ref().options.as_ref())?;
        let id = worker_id(&request.get_ref().id)?;
        let change = self.service.remove_worker(call, id).await?;
        changed_worker(&change, id)
    }

    async fn list_policies(&self, request: Request<pb::ReadRequest>) -> Answer<pb::ListPoliciesResponse> {
        let state = self.service.read(consistency(request.get_ref().stale)).await?;
        let policies = state.policies().map(|record| wire::record_to_pb(record)).collect();
        Ok(Response::new(pb::ListPoliciesResponse { revision: state.revision(), policies }))
    }

    async fn get_policy(&self, request: Request<pb::GetPolicyRequest>) -> Answer<pb::GetPolicyResponse> {
        let pb::GetPolicyRequest { stale, model } = request.into_inner();
        let (state, record) = self.service.policy(consistency(stale), &model).await?;
        let policy = Some(wire::record_to_pb(&record));
        Ok(Response::new(pb::GetPolicyResponse { revision: state.revision(), policy }))
    }

    async fn put_policy(&self, request: Request<pb::PutPolicyRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "PutPolicy", request.get_ref().options.as_ref())?;
        let request = request.into_inner();
        let document = wire::document_from_pb(required(request.document, "document")?).map_err(invalid)?;
        let (change, record) = self.service.put_policy(call, &request.model, document).await?;
        changed(&change, Some(pb::change_response::Object::Policy(wire::record_to_pb(&record))))
    }

    async fn delete_policy(&self, request: Request<pb::DeletePolicyRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "DeletePolicy", request.get_ref().options.as_ref())?;
        changed(&self.service.delete_policy(call, &request.get_ref().model).await?, None)
    }

    async fn get_settings(&self, request: Request<pb::ReadRequest>) -> Answer<pb::GetSettingsResponse> {
        let state = self.service.read(consistency(request.get_ref().stale)).await?;
        let (settings, mod_revision) = state.settings();
        let settings = Some(shown_settings(settings));
        Ok(Response::new(pb::GetSettingsResponse { revision: state.revision(), settings, mod_revision }))
    }

    async fn put_settings(&self, request: Request<pb::PutSettingsRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "PutSettings", request.get_ref().options.as_ref())?;
        let name = required(request.into_inner().settings, "settings")?.name;
        let settings = ClusterSettings { name };
        let change = self.service.put_settings(call, settings.clone()).await?;
        changed(&change, Some(pb::change_response::Object::Settings(shown_settings(&settings))))
    }

    async fn get_pairing(&self, request: Request<pb::PairingRequest>) -> Answer<pb::PairingResponse> {
        let of = request.into_inner();
        let (revision, matrix) = self.service.pairing(consistency(of.stale), query(&of)?).await?;
        json(revision, &matrix)
    }

    async fn explain_pairing(&self, request: Request<pb::ExplainPairingRequest>) -> Answer<pb::PairingResponse> {
        let pb::ExplainPairingRequest { of, spec: described } = request.into_inner();
        let of = of.unwrap_or_default();
        let (consistency, query, spec) = (consistency(of.stale), query(&of)?, spec(described)?);
        let (revision, explanation) = self.service.explain_pairing(consistency, query, spec).await?;
        json(revision, &explanation)
    }

    async fn list_gateways(&self, request: Request<pb::ListGatewaysRequest>) -> Answer<pb::ListGatewaysResponse> {
        let listed = self.service.gateways.list(request.get_ref().stale).await.map_err(ApiError::from)?;
        let Everywhere { gateways, members } = listed;
        let unheard = members.iter().filter(|asked| !asked.answered).map(|asked| asked.node_id);
        Ok(Response::new(pb::ListGatewaysResponse {
            revision: self.service.local().revision(),
            gateways: gateways.iter().map(shown_gateway).collect(),
            unheard_members: unheard.collect(),
        }))
    }

    async fn get_admission(&self, request: Request<pb::ReadRequest>) -> Answer<pb::GetAdmissionResponse> {
        let state = self.service.read(consistency(request.get_ref().stale)).await?;
        Ok(Response::new(admission::shown(&state).into_pb(state.revision())))
    }

    async fn get_cluster(&self, request: Request<pb::ReadRequest>) -> Answer<pb::GetClusterResponse> {
        let cluster = self.service.cluster(consistency(request.get_ref().stale)).await?;
        let member = |member: super::service::cluster::ClusterMember| pb::ClusterMember {
            node_id: member.node_id,
            role: member.role.to_owned(),
            health: member.health.to_owned(),
            peer_address: member.peer_address,
            api_address: member.api_address,
            storage_id: member.storage_id.to_string(),
            lag: member.lag,
            heard_ms: member.heard_ms,
            trouble: member.trouble.unwrap_or_default(),
        };
        Ok(Response::new(pb::GetClusterResponse {
            cluster_id: cluster.cluster_id.to_string(),
            history_id: cluster.history_id.to_string(),
            name: cluster.name.unwrap_or_default(),
            revision: cluster.revision,
            node_id: cluster.node_id,
            seen_by: cluster.seen_by,
            leader: cluster.leader,
            term: cluster.term,
            last_log_index: cluster.last_log_index,
            committed_index: cluster.committed_index,
            applied_index: cluster.applied_index,
            in_contact: cluster.in_contact,
            store_failure: cluster.store_failure.unwrap_or_default(),
            members: cluster.members.into_iter().map(member).collect(),
        }))
    }

    async fn change_members(&self, request: Request<pb::ChangeMembersRequest>) -> Answer<pb::ChangeMembersResponse> {
        use pb::change_members_request::Change as Pb;
        let options = pb::ChangeOptions { dry_run: request.get_ref().dry_run, ..pb::ChangeOptions::default() };
        let call = call(&request, "ChangeMembers", Some(&options))?;
        let change = match required(request.into_inner().change, "change")? {
            Pb::Join(pb::Members { node_ids, allow_even }) => MemberChange::Promote { node_ids, allow_even },
            Pb::Remove(pb::Members { node_ids, allow_even }) => MemberChange::Remove { node_ids, allow_even },
            Pb::Replace(pb::Replacement { node_id, with }) => MemberChange::Replace { old: node_id, new: with },
        };
        let voters = self.service.change_members(call, change).await?;
        Ok(Response::new(pb::ChangeMembersResponse { voters }))
    }

    async fn list_tokens(&self, request: Request<pb::ReadRequest>) -> Answer<pb::ListTokensResponse> {
        let state = self.service.read(consistency(request.get_ref().stale)).await?;
        let tokens = state.tokens().map(|token| shown_token(token)).collect();
        Ok(Response::new(pb::ListTokensResponse { revision: state.revision(), tokens }))
    }

    async fn create_token(&self, request: Request<pb::CreateTokenRequest>) -> Answer<pb::CreateTokenResponse> {
        let call = call(&request, "CreateToken", request.get_ref().options.as_ref())?;
        let pb::CreateTokenRequest { name, role, .. } = request.into_inner();
        let new = self.service.create_token(call, name, wire::role(role).map_err(invalid)?).await?;
        Ok(Response::new(pb::CreateTokenResponse {
            revision: new.change.outcome.revision,
            dry_run: new.change.dry_run,
            token: Some(shown_token(&new.token)),
            secret: new.secret.unwrap_or_default(),
        }))
    }

    async fn revoke_token(&self, request: Request<pb::RevokeTokenRequest>) -> Answer<pb::ChangeResponse> {
        let call = call(&request, "RevokeToken", request.get_ref().options.as_ref())?;
        changed(&self.service.revoke_token(call, uuid(&request.get_ref().id)?).await?, None)
    }

    async fn who_am_i(&self, request: Request<pb::WhoAmIRequest>) -> Answer<pb::WhoAmIResponse> {
        let identity = request.extensions().get::<Identity>();
        let name = identity.and_then(Identity::name).unwrap_or_default().to_owned();
        let role = wire::role_number(identity.map_or(Role::Viewer, |identity| identity.role));
        Ok(Response::new(pb::WhoAmIResponse { name, role }))
    }

    async fn list_audit(&self, request: Request<pb::ListAuditRequest>) -> Answer<pb::ListAuditResponse> {
        let pb::ListAuditRequest { stale, limit, actor, object, action } = request.into_inner();
        let limit = if limit == 0 { RECORDS } else { limit } as usize;
        let wanted = |record: &smg_state::AuditRecord| {
            record.actor.starts_with(&actor) && record.object.starts_with(&object) && record.action.starts_with(&action)
        };
        let (revision, records) = self.service.audit(consistency(stale), limit, wanted).await?;
        let records = records.iter().map(|record| codec::audit_to_pb(record)).collect();
        Ok(Response::new(pb::ListAuditResponse { revision, records }))
    }

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Answer<Self::WatchStream> {
        use pb::watch_request::List;
        let list = request.get_ref().list();
        if list == List::Tokens
            && let Some(identity) = request.extensions().get::<Identity>()
        {
            let need = Role::required("GET", "/fleet/tokens");
            identity.clone().at_least(need).map_err(ApiError::Denied)?;
        }
        let pb::WatchRequest { model, from_revision, from_history_id, .. } = request.into_inner();
        let followed = match list {
            List::Workers => Followed::Workers { model: Some(model).filter(|model| !model.is_empty()) },
            List::Policies => Followed::Policies,
            List::Tokens => Followed::Tokens,
            List::Gateways => Followed::Gateways,
        };
        let history_id = if from_history_id.is_empty() { None } else { Some(uuid(&from_history_id)?) };
        let resume = from_revision.map(|revision| Resume { revision, history_id });
        let steps = self.service.watch(followed, resume).await?;
        Ok(Response::new(Box::pin(steps.map(|batch| Ok::<_, Status>(step(batch))))))
    }

    async fn backup(&self, _: Request<pb::BackupRequest>) -> Answer<Self::BackupStream> {
        let Backup { revision, bytes, seat } = self.service.backup().await?;
        let parts = stream::unfold((bytes, seat), move |(mut left, seat): (Bytes, _)| async move {
            let data = left.split_to(left.len().min(PART));
            (!data.is_empty())
                .then(|| (Ok::<_, Status>(pb::BackupPart { revision, data: data.to_vec() }), (left, seat)))
        });
        Ok(Response::new(Box::pin(parts)))
    }
}
