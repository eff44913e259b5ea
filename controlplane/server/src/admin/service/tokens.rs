//! Admin tokens. A secret is in the answer to its creation and nowhere else.

use std::sync::Arc;

use smg_fleet::{AdminToken, Role, StartupToken, TokenHash, access};
use smg_state::{Command, State};
use uuid::Uuid;

use super::{Call, Change, Consistency, Service};
use crate::admin::error::ApiError;

/// A token that was just created, and its secret.
pub(crate) struct NewToken {
    /// What created it.
    pub change: Change,
    /// The token.
    pub token: Arc<AdminToken>,
    /// Its secret; of a rehearsal one that opens nothing is not given.
    pub secret: Option<String>,
}

/// A secret nobody can guess: 256 random bits.
fn mint() -> String {
    let random: [u8; 32] = rand::random();
    random.iter().fold("smg_".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

impl Service {
    /// One token.
    pub(crate) async fn token(
        &self,
        consistency: Consistency,
        id: Uuid,
    ) -> Result<(Arc<State>, Arc<AdminToken>), ApiError> {
        let state = self.read(consistency).await?;
        let token = state.token(id).cloned().ok_or_else(|| ApiError::TokenNotFound(id.to_string()))?;
        Ok((state, token))
    }

    /// Creates a token.
    pub(crate) async fn create_token(&self, call: Call, name: String, role: Role) -> Result<NewToken, ApiError> {
        access::check_name(&name).map_err(|error| ApiError::BadRequest(error.to_string()))?;
        let (id, secret) = (Uuid::now_v7(), mint());
        let token = StartupToken { name, role, hash: TokenHash::of(&secret) };
        let change = self.change(call, Command::CreateToken { id, token }).await?;
        let Some(token) = change.state.token(id).cloned() else {
            // A repeated Idempotency-Key is answered with the first outcome: the token exists, and its secret was shown then.
            let message = if change.settled {
                "the token was created by an earlier request with this Idempotency-Key, which showed its secret"
            } else {
                "the token was created, but this member has not seen it yet: its secret is lost, revoke it"
            };
            return Err(ApiError::Happened(message));
        };
        let secret = (!change.dry_run).then_some(secret);
        Ok(NewToken { change, token, secret })
    }

    /// Revokes a token.
    pub(crate) async fn revoke_token(&self, call: Call, id: Uuid) -> Result<Change, ApiError> {
        self.change(call, Command::RevokeToken { id }).await
    }
}
