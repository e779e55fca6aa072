//! API keys, and the salt by which prefixes are shared.

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::error::{ApiError, Result};

/// Where Anthropic's clients put the key.
const API_KEY: &str = "x-api-key";

/// The keys of a server, as digests: of equal length, and no memory holds the keys for long.
pub(crate) struct Keys(Vec<[u8; 32]>);

impl Keys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self(keys.iter().map(|k| Sha256::digest(k).into()).collect())
    }

    /// The salt of whoever asks: a function of the key alone, so that nobody learns by timing what others asked.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<u64> {
        if self.0.is_empty() {
            return Ok(0);
        }
        let key = match (headers.get(header::AUTHORIZATION), headers.get(API_KEY)) {
            (Some(value), _) => {
                let parts = value.to_str().ok().and_then(|v| v.split_once(' '));
                let bearer = parts.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
                let wrong = || ApiError::key("`Authorization` is not of the form `Bearer KEY`");
                bearer.ok_or_else(wrong)?.1.trim()
            }
            (None, Some(value)) => value.to_str().unwrap_or("").trim(),
            (None, None) => return Err(ApiError::key("a key is needed: send `Authorization: Bearer KEY`")),
        };
        let digest: [u8; 32] = Sha256::digest(key).into();
        // Every key is compared, and every byte: the time taken tells nothing.
        let known = self.0.iter().fold(false, |known, k| known | equal(k, &digest));
        if known { Ok(salted(0, key)) } else { Err(ApiError::key("the key is not one of this server's")) }
    }
}

/// A salt for `text` under `salt`.
pub(crate) fn salted(salt: u64, text: &str) -> u64 {
    let hash = Sha256::new().chain_update(b"fir prefix salt\0").chain_update(salt.to_le_bytes()).chain_update(text);
    let digest: [u8; 32] = hash.finalize().into();
    u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i: usize| digest[i]))
}

fn equal(a: &[u8; 32], b: &[u8; 32]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(keys: &Keys, value: &str) -> Result<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, value.parse().unwrap());
        keys.check(&headers)
    }

    #[test]
    fn each_key_has_its_own_salt_and_strangers_have_none() {
        let keys = Keys::new(&["one".into(), "two".into()]);
        let (one, two) = (ask(&keys, "Bearer one").unwrap(), ask(&keys, "bearer two").unwrap());
        assert_ne!(one, two);
        assert_eq!(one, ask(&keys, "Bearer one").unwrap());
        for wrong in ["Bearer three", "Bearer ", "Bearer", "Basic one", "one", "Bearer onetwo"] {
            assert!(ask(&keys, wrong).is_err(), "{wrong}");
        }
        assert!(keys.check(&HeaderMap::new()).is_err());
        let mut other = HeaderMap::new();
        other.insert(API_KEY, "one".parse().unwrap());
        assert_eq!(keys.check(&other).unwrap(), one);
        other.insert(API_KEY, "three".parse().unwrap());
        assert!(keys.check(&other).is_err());
        assert_eq!(Keys::new(&[]).check(&HeaderMap::new()).unwrap(), 0);
    }

    #[test]
    fn digests_differ_in_any_byte() {
        let a = [7u8; 32];
        for i in 0..32 {
            let mut b = a;
            b[i] ^= 1;
            assert!(!equal(&a, &b));
        }
        assert!(equal(&a, &a));
    }
}
