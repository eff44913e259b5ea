//! A bounded memory of tokenizations.
//!
//! Prompts repeat: evaluations, retries, shared prefixes sent as whole prompts. A tokenization is found again by the SHA-256
//! of its text, so the memory holds no text and nobody can provoke a wrong hit. It has two generations: what is used lives
//! in the young one; when that has half of the bytes it becomes the old one, and what was in the old one is forgotten. So
//! the bound holds without any list to keep, and what is used within half a bound's worth of others survives.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

type Key = [u8; 32];

/// What an entry costs beside its ids: key, pointers, the table's slack.
const ENTRY: usize = 128;

#[derive(Debug, Default)]
struct Generation {
    entries: HashMap<Key, Arc<[u32]>>,
    bytes: usize,
}

/// Tokenizations by text. All methods may be called from many threads.
#[derive(Debug)]
pub struct TokenCache {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    young: Generation,
    old: Generation,
    hits: u64,
    misses: u64,
}

/// Numbers of a cache, since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheNumbers {
    /// Tokenizations found.
    pub hits: u64,
    /// Tokenizations not found.
    pub misses: u64,
    /// Tokenizations held now.
    pub entries: usize,
    /// Bytes held now.
    pub bytes: usize,
}

impl TokenCache {
    /// A cache of at most `limit` bytes; 0 = nothing is kept.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// The ids of `text`: those found, or those that `encode` makes. `special`: whether special tokens were added, which
    /// makes it another tokenization.
    ///
    /// # Errors
    /// Those of `encode`; nothing is kept then.
    pub fn get_or_encode<E>(
        &self,
        text: &str,
        special: bool,
        encode: impl FnOnce() -> Result<Vec<u32>, E>,
    ) -> Result<Arc<[u32]>, E> {
        if self.limit == 0 {
            return Ok(encode()?.into());
        }
        let key: Key = Sha256::new().chain_update([u8::from(special)]).chain_update(text).finalize().into();
        if let Some(ids) = self.state.lock().find(&key, self.limit) {
            return Ok(ids);
        }
        let ids: Arc<[u32]> = encode()?.into();
        self.state.lock().keep(key, Arc::clone(&ids), self.limit);
        Ok(ids)
    }

    /// Its numbers.
    #[must_use]
    pub fn numbers(&self) -> CacheNumbers {
        let state = self.state.lock();
        CacheNumbers {
            hits: state.hits,
            misses: state.misses,
            entries: state.young.entries.len() + state.old.entries.len(),
            bytes: state.young.bytes + state.old.bytes,
        }
    }
}

fn cost(ids: &[u32]) -> usize {
    ENTRY + mem::size_of_val(ids)
}

impl State {
    fn find(&mut self, key: &Key, limit: usize) -> Option<Arc<[u32]>> {
        if let Some(ids) = self.young.entries.get(key) {
            self.hits += 1;
            return Some(Arc::clone(ids));
        }
        let Some(ids) = self.old.entries.remove(key) else {
            self.misses += 1;
            return None;
        };
        self.hits += 1;
        self.old.bytes -= cost(&ids);
        self.keep(*key, Arc::clone(&ids), limit);
        Some(ids)
    }

    fn keep(&mut self, key: Key, ids: Arc<[u32]>, limit: usize) {
        let cost = cost(&ids);
        let half = limit / 2;
        if cost > half {
            return;
        }
        if self.young.bytes + cost > half {
            self.old = mem::take(&mut self.young);
        }
        if self.young.entries.insert(key, ids).is_none() {
            self.young.bytes += cost;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn get(cache: &TokenCache, text: &str) -> Arc<[u32]> {
        cache.get_or_encode(text, false, || Ok::<_, Infallible>(vec![1; text.len()])).unwrap()
    }

    #[test]
    fn a_text_is_encoded_once_and_with_special_tokens_once_more() {
        let cache = TokenCache::new(1 << 20);
        get(&cache, "abc");
        let again = cache.get_or_encode("abc", false, || -> Result<_, Infallible> { panic!("encoded twice") }).unwrap();
        assert_eq!(&*again, [1, 1, 1]);
        let special = cache.get_or_encode("abc", true, || Ok::<_, Infallible>(vec![0, 1, 1, 1])).unwrap();
        assert_eq!(special.len(), 4);
        assert_eq!(cache.numbers(), CacheNumbers { hits: 1, misses: 2, entries: 2, bytes: 2 * ENTRY + 12 + 16 });
    }

    #[test]
    fn the_bound_holds_and_what_is_used_survives() {
        let limit = 20 * (ENTRY + 4);
        let cache = TokenCache::new(limit);
        for text in (0..1000u32).filter_map(|number| char::from_u32(0x4e00 + number)) {
            cache.get_or_encode(&text.to_string(), false, || Ok::<_, Infallible>(vec![1])).unwrap();
            cache.get_or_encode("often", false, || Ok::<_, Infallible>(vec![2])).unwrap();
            assert!(cache.numbers().bytes <= limit);
        }
        assert_eq!(cache.numbers().misses, 1001);
    }

    #[test]
    fn what_is_larger_than_half_the_bound_is_not_kept() {
        let cache = TokenCache::new(1000);
        get(&cache, &"a".repeat(200));
        assert_eq!(cache.numbers().entries, 0);
    }
}
