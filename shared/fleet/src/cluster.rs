//! Settings of the cluster as a whole. What steers requests is in policy documents instead.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest cluster name, in bytes.
const MAX_NAME_BYTES: usize = 128;

/// Why settings were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// Empty, too long, or with control characters.
    #[error("name must be 1 to {MAX_NAME_BYTES} bytes without control characters")]
    Name,
}

/// The body of `PUT /fleet/settings`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterSettings {
    /// What people call this cluster; shown in `GET /fleet/cluster`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl ClusterSettings {
    /// Checks the bounds.
    ///
    /// # Errors
    /// The first that is broken.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let sound =
            |name: &String| !name.is_empty() && name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control);
        if self.name.as_ref().is_none_or(sound) { Ok(()) } else { Err(SettingsError::Name) }
    }
}
