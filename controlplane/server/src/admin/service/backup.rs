//! The whole state as one file.

use bytes::Bytes;
use smg_fleet::Revision;
use tokio::sync::OwnedSemaphorePermit;

use super::{Consistency, Service};
use crate::admin::error::ApiError;
use crate::backup;

/// A backup on its way; it counts until it is dropped.
pub(crate) struct Backup {
    /// The revision that it holds.
    pub revision: Revision,
    /// The file.
    pub bytes: Bytes,
    /// Its place among those on their way.
    pub seat: OwnedSemaphorePermit,
}

impl Service {
    /// The state as of all that was acknowledged before, at one revision.
    pub(crate) async fn backup(&self) -> Result<Backup, ApiError> {
        let seat = std::sync::Arc::clone(&self.backups).try_acquire_owned();
        let seat = seat.map_err(|_| ApiError::Busy("other backups are on their way: try again later"))?;
        let state = self.read(Consistency::Linearizable).await?;
        let revision = state.revision();
        let key = self.access.backup_key.clone();
        let written =
            tokio::task::spawn_blocking(move || backup::write(&state, key.as_ref(), smg_net::unix_millis())).await;
        match written {
            Ok(Ok(bytes)) => Ok(Backup { revision, bytes, seat }),
            Ok(Err(error)) => {
                tracing::error!(target: "smg", %error, "a backup could not be written");
                Err(ApiError::Internal("the backup could not be written: its keys cannot be sealed"))
            }
            Err(_) => Err(ApiError::Internal("the backup could not be written")),
        }
    }
}
