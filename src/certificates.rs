//! The certificates of a process: read, followed, and watched for their end.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smg_net::mutual::identity::Part;
use smg_net::mutual::validity::{Stage, Validity};
use smg_net::mutual::{Files, MutualTls};
use smg_net::tls::ServerTls;
use smg_telemetry::{Metrics, SMG};

use crate::process::RunError;

/// How often it is looked when certificates end.
const LOOK: Duration = Duration::from_secs(5);
/// How often the same warning is given.
const REPEAT: Duration = Duration::from_secs(6 * 3600);

/// The certificate of a part, from the files in a directory. It is followed and watched from here on.
///
/// # Errors
/// When the files cannot be used, or are another part's.
pub fn of_part(directory: &Path, part: Part, metrics: &Arc<Metrics>) -> Result<Arc<MutualTls>, RunError> {
    let tls = MutualTls::load(Files::within(directory), part).map_err(|error| RunError::start("--tls-dir", error))?;
    tracing::info!(target: SMG, identity = %tls.identity(), "TLS between the parts of the fleet");
    smg_net::spawn("fleet-tls-files", Arc::clone(&tls).follow());
    let looked = Arc::clone(&tls);
    watch(metrics, "part", move || Some(looked.validity()));
    let looked = Arc::clone(&tls);
    watch(metrics, "authority", move || looked.authority_validity());
    Ok(tls)
}

/// Follows and watches the certificate of the client edge.
pub fn of_edge(tls: &Arc<ServerTls>, metrics: &Arc<Metrics>) {
    smg_net::spawn("tls-files", Arc::clone(tls).follow());
    let looked = Arc::clone(tls);
    watch(metrics, "edge", move || looked.validity());
}

/// Shows when a certificate ends, and warns before and after.
fn watch(metrics: &Arc<Metrics>, certificate: &'static str, look: impl Fn() -> Option<Validity> + Send + 'static) {
    let gauge = metrics.tls_certificate_not_after.with_label_values(&[certificate]);
    smg_net::spawn("certificate-end", async move {
        let mut warned: Option<(Validity, Stage, Instant)> = None;
        let mut ticks = tokio::time::interval(LOOK);
        loop {
            ticks.tick().await;
            let Some(validity) = look() else { continue };
            gauge.set(i64::try_from(validity.not_after).unwrap_or(i64::MAX));
            let now = smg_net::unix_millis() / 1000;
            let stage = validity.stage(now);
            if warned.is_some_and(|(of, said, at)| of == validity && said == stage && at.elapsed() < REPEAT) {
                continue;
            }
            warned = Some((validity, stage, Instant::now()));
            let hours_left = validity.left(now).as_secs() / 3600;
            match stage {
                Stage::Fresh => {}
                Stage::Ending => tracing::warn!(target: SMG, certificate, hours_left, "a certificate ends soon"),
                Stage::Expired => {
                    tracing::error!(target: SMG, certificate, "a certificate has expired: nobody accepts it")
                }
            }
        }
    });
}
