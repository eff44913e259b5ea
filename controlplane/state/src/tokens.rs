//! Admin tokens.
//!
//! Invariant: a fleet has no token at all (then its admin API is open, or guarded by other means), or one with the role admin, unless
//! start-up flags took the last one away; flags give it back.

use std::sync::Arc;

use smg_fleet::{AdminToken, Origin, Role, StartupToken, access};
use uuid::Uuid;

use crate::apply::{Effect, reject};
use crate::command::{Rejection, RejectionCode};
use crate::state::State;

/// Most admin tokens of a fleet. Each delta carries all of them.
pub const MAX_TOKENS: usize = 256;

impl State {
    pub(crate) fn create_token(&mut self, id: Uuid, token: &StartupToken, at: u64) -> Result<Effect, Rejection> {
        if let Err(error) = access::check_name(&token.name) {
            return reject(RejectionCode::Invalid, error.to_string());
        }
        if self.tokens.contains_key(&id) || self.tokens.values().any(|known| known.name == token.name) {
            return reject(RejectionCode::TokenAlreadyExists, format!("a token named '{}' already exists", token.name));
        }
        if self.tokens.len() >= MAX_TOKENS {
            return reject(RejectionCode::Limit, format!("the fleet already has {MAX_TOKENS} tokens"));
        }
        if token.role != Role::Admin && !self.has_other_admin(None) {
            return reject(RejectionCode::Invalid, "the first token needs the role admin: nobody could create another");
        }
        self.store_token(id, token, Origin::Api, at);
        Ok(Effect::whole())
    }

    pub(crate) fn revoke_token(&mut self, id: Uuid, expected: Option<u64>) -> Result<Effect, Rejection> {
        let Some(token) = self.tokens.get(&id) else {
            return reject(RejectionCode::TokenNotFound, format!("token {id} not found"));
        };
        if expected.is_some_and(|expected| expected != token.mod_revision) {
            let message = format!("token {id} is at revision {}", token.mod_revision);
            return reject(RejectionCode::RevisionConflict, message);
        }
        if token.role == Role::Admin && !self.has_other_admin(Some(id)) {
            let message = "the last admin token cannot be revoked: create another one first";
            return reject(RejectionCode::LastAdminToken, message);
        }
        self.tokens.remove(&id);
        Ok(Effect::whole())
    }

    /// Makes the tokens of start-up flags those of `named`. A name that was created by API now belongs to the flags.
    pub(crate) fn reconcile_startup_tokens(&mut self, named: &[(Uuid, StartupToken)], at: u64) -> Effect {
        let mut changed = false;
        let is_named = |name: &str| named.iter().any(|(_, token)| token.name == name);
        self.tokens.retain(|_, token| {
            let stays = token.origin == Origin::Api || is_named(&token.name);
            changed |= !stays;
            stays
        });
        for (id, token) in named {
            let known = self.tokens.values().find(|known| known.name == token.name);
            let same = |known: &&Arc<AdminToken>| {
                known.origin == Origin::Startup && known.role == token.role && known.hash == token.hash
            };
            if known.is_some_and(|known| same(&known)) || (known.is_none() && self.tokens.len() >= MAX_TOKENS) {
                continue;
            }
            let id = known.map_or(*id, |known| known.id);
            self.store_token(id, token, Origin::Startup, at);
            changed = true;
        }
        if changed { Effect::whole() } else { Effect::none(None) }
    }

    fn has_other_admin(&self, id: Option<Uuid>) -> bool {
        self.tokens.values().any(|token| token.role == Role::Admin && Some(token.id) != id)
    }

    fn store_token(&mut self, id: Uuid, token: &StartupToken, origin: Origin, at: u64) {
        let token = AdminToken {
            id,
            name: token.name.clone(),
            role: token.role,
            hash: token.hash,
            origin,
            created_at_unix_ms: at,
            mod_revision: self.revision + 1,
        };
        self.tokens.insert(id, Arc::new(token));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use smg_fleet::TokenHash;

    use super::*;
    use crate::codec;
    use crate::command::{Command, Envelope, Outcome};

    fn token(name: &str, role: Role) -> StartupToken {
        StartupToken { name: name.to_owned(), role, hash: TokenHash::of(name) }
    }

    fn apply(state: &mut State, command: Command) -> Outcome {
        let command_id = Uuid::from_u128(u128::from(rand_like(state)));
        let envelope =
            Envelope { command_id, actor: "test".to_owned(), proposed_at_unix_ms: 7, expected_revision: None, command };
        let envelope = codec::envelope_from_pb(codec::envelope_to_pb(&envelope)).unwrap();
        let outcome = state.apply(&envelope);
        assert_eq!(codec::decode_state(&codec::encode_state(state)).unwrap(), *state);
        outcome
    }

    /// A number that no command of the state has had.
    fn rand_like(state: &State) -> u64 {
        state.memory.iter().count() as u64 + 1
    }

    fn create(state: &mut State, n: u128, name: &str, role: Role) -> Result<(), RejectionCode> {
        let command = Command::CreateToken { id: Uuid::from_u128(n), token: token(name, role) };
        apply(state, command).accepted().map(drop).map_err(|rejection| rejection.code)
    }

    fn revoke(state: &mut State, n: u128) -> Result<(), RejectionCode> {
        let command = Command::RevokeToken { id: Uuid::from_u128(n) };
        apply(state, command).accepted().map(drop).map_err(|rejection| rejection.code)
    }

    fn names(state: &State) -> Vec<&str> {
        state.tokens().map(|token| token.name.as_str()).collect()
    }

    #[test]
    fn there_is_always_an_admin_among_the_tokens() {
        let state = &mut State::default();
        assert_eq!(create(state, 1, "v", Role::Viewer), Err(RejectionCode::Invalid));
        assert_eq!(create(state, 1, "a", Role::Admin), Ok(()));
        assert_eq!(create(state, 2, "v", Role::Viewer), Ok(()));
        assert_eq!(create(state, 3, "v", Role::Admin), Err(RejectionCode::TokenAlreadyExists));
        assert_eq!(revoke(state, 1), Err(RejectionCode::LastAdminToken));
        assert_eq!(create(state, 3, "b", Role::Admin), Ok(()));
        assert_eq!(revoke(state, 1), Ok(()));
        assert_eq!(revoke(state, 1), Err(RejectionCode::TokenNotFound));
        assert_eq!(names(state), ["v", "b"]);
        assert_eq!(create(state, 4, "", Role::Admin), Err(RejectionCode::Invalid));
    }

    #[test]
    fn start_up_flags_own_the_tokens_they_name_and_no_others() {
        let state = &mut State::default();
        create(state, 1, "api", Role::Admin).unwrap();
        let reconcile = |state: &mut State, tokens: &[(u128, StartupToken)]| {
            let tokens = tokens.iter().map(|(n, token)| (Uuid::from_u128(*n), token.clone())).collect();
            apply(state, Command::ReconcileStartupTokens { tokens }).accepted().unwrap().revision
        };
        let named = [(5, token("x", Role::Admin)), (6, token("y", Role::Viewer))];
        let first = reconcile(state, &named);
        assert_eq!(names(state), ["api", "x", "y"]);
        assert_eq!(reconcile(state, &[(7, named[0].1.clone()), (8, named[1].1.clone())]), first, "nothing changed");
        reconcile(state, &[(9, token("y", Role::Operator))]);
        assert_eq!(names(state), ["api", "y"]);
        assert_eq!(state.token(Uuid::from_u128(6)).unwrap().role, Role::Operator, "it keeps its id");
        reconcile(state, &[]);
        assert_eq!(names(state), ["api"]);
    }

    #[test]
    fn tokens_reach_gateways_with_the_snapshot_and_with_deltas() {
        let mut state = State::default();
        let before = state.snapshot();
        create(&mut state, 1, "a", Role::Admin).unwrap();
        let after = state.snapshot();
        assert_eq!(after.tokens.len(), 1);
        let delta = before.diff(&after, after.checksum());
        let delta = smg_fleet::wire::decode_delta(&smg_fleet::wire::encode_delta(&delta)).unwrap();
        assert_eq!(before.apply(&delta).unwrap(), after);
    }
}
