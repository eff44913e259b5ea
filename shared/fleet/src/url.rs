//! Worker addresses.
//!
//! One engine must be one worker, however its address is spelled: `http://H:8000/` and `http://h:8000` are the same. A [`WorkerUrl`] is
//! normalised at the edge (lower-case host, shortest IPv6 address, no port that the scheme implies, percent-encoding only where it is
//! needed, no dot segments, no trailing slash: RFC 3986 section 6.2) and everything behind it compares plain strings.

use std::fmt;

use thiserror::Error;

use crate::worker::Wire;

/// Longest accepted worker URL, in bytes.
pub const MAX_URL_BYTES: usize = 2048;

/// Why a worker URL was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UrlError {
    /// The scheme is missing or not one of the known ones.
    #[error("url must start with http://, https://, grpc://, grpcs:// or ipc://")]
    Scheme,
    /// Longer than [`MAX_URL_BYTES`].
    #[error("url is longer than {MAX_URL_BYTES} bytes")]
    TooLong,
    /// No host, or a host with characters that cannot occur in one.
    #[error("url has no valid host")]
    Host,
    /// The port is not a number from 1 to 65535.
    #[error("url has no valid port")]
    Port,
    /// A `%` that begins no percent-encoding.
    #[error("url has an invalid percent-encoding")]
    Encoding,
    /// Query, fragment, credentials, white space or control characters.
    #[error("url must not contain credentials, a query, a fragment or white space")]
    Extra,
}

/// The scheme of a worker URL. It selects the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// `http://`
    Http,
    /// `https://`
    Https,
    /// `grpc://`
    Grpc,
    /// `grpcs://`
    Grpcs,
    /// `ipc://`: a direct ZMQ engine.
    Ipc,
}

impl Scheme {
    const ALL: [(&'static str, Scheme); 5] = [
        ("http://", Scheme::Http),
        ("https://", Scheme::Https),
        ("grpc://", Scheme::Grpc),
        ("grpcs://", Scheme::Grpcs),
        ("ipc://", Scheme::Ipc),
    ];

    fn split(text: &str) -> Option<(Scheme, &str)> {
        Self::ALL.iter().find_map(|(prefix, scheme)| text.strip_prefix(prefix).map(|rest| (*scheme, rest)))
    }

    fn prefix(self) -> &'static str {
        Self::ALL.iter().find(|(_, scheme)| *scheme == self).map_or("", |(prefix, _)| prefix)
    }

    /// The port of a URL that names none.
    fn default_port(self) -> Option<u16> {
        match self {
            Scheme::Http => Some(80),
            Scheme::Https => Some(443),
            Scheme::Grpc | Scheme::Grpcs | Scheme::Ipc => None,
        }
    }

    /// The wire that workers of this scheme speak.
    pub fn wire(self) -> Wire {
        match self {
            Scheme::Http | Scheme::Https => Wire::Http,
            Scheme::Grpc | Scheme::Grpcs => Wire::Grpc,
            Scheme::Ipc => Wire::Zmq,
        }
    }
}

/// A normalised worker address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WorkerUrl {
    text: String,
    scheme: Scheme,
    host_end: usize,
    port: Option<u16>,
}

impl WorkerUrl {
    /// Parses and normalises `text`.
    ///
    /// # Errors
    /// [`UrlError`] says what is wrong, in words for the operator.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        if text.len() > MAX_URL_BYTES {
            return Err(UrlError::TooLong);
        }
        let (scheme, rest) = Scheme::split(text).ok_or(UrlError::Scheme)?;
        if text.chars().any(|c| c.is_whitespace() || c.is_control() || matches!(c, '?' | '#')) {
            return Err(UrlError::Extra);
        }
        if scheme == Scheme::Ipc {
            if rest.is_empty() {
                return Err(UrlError::Host);
            }
            return Ok(Self { text: text.to_owned(), scheme, host_end: text.len(), port: None });
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        if authority.contains('@') {
            return Err(UrlError::Extra);
        }
        let (host, port) = split_port(authority)?;
        let port = port.filter(|port| scheme.default_port() != Some(*port));
        let mut normalised = format!("{}{host}", scheme.prefix());
        let host_end = normalised.len();
        if let Some(port) = port {
            normalised.push(':');
            normalised.push_str(&port.to_string());
        }
        normalised.push_str(normal_path(path)?.trim_end_matches('/'));
        if normalised.len() > MAX_URL_BYTES {
            return Err(UrlError::TooLong);
        }
        Ok(Self { text: normalised, scheme, host_end, port })
    }

    /// How one data-parallel rank of the engine is shown: not an address any more.
    #[must_use]
    pub fn with_rank(mut self, rank: u32) -> Self {
        self.text.push_str(&format!("@{rank}"));
        self
    }

    /// The normalised URL, without a trailing slash: paths are appended as they are.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The scheme.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The host as it stands in the URL: an IPv6 address keeps its brackets.
    pub fn host(&self) -> &str {
        self.text.get(self.scheme.prefix().len()..self.host_end).unwrap_or_default()
    }

    /// The port, unless it is the one that the scheme implies.
    pub fn port(&self) -> Option<u16> {
        self.port
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The host in its one spelling, and the port.
fn split_port(authority: &str) -> Result<(String, Option<u16>), UrlError> {
    let (host, port) = if authority.starts_with('[') {
        let end = authority.find(']').ok_or(UrlError::Host)? + 1;
        let (host, rest) = authority.split_at(end);
        let inner = host.trim_start_matches('[').trim_end_matches(']');
        let address: std::net::Ipv6Addr = inner.parse().map_err(|_| UrlError::Host)?;
        let host = format!("[{address}]");
        match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => return Err(UrlError::Port),
        }
    } else {
        match authority.split_once(':') {
            Some((host, port)) => (host.to_ascii_lowercase(), Some(port)),
            None => (authority.to_ascii_lowercase(), None),
        }
    };
    let plausible = !host.is_empty()
        && (host.starts_with('[') || host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_')));
    if !plausible {
        return Err(UrlError::Host);
    }
    let port = match port {
        None => None,
        Some(text) => match text.parse::<u16>() {
            Ok(port) if port > 0 && text.chars().all(|c| c.is_ascii_digit()) => Some(port),
            _ => return Err(UrlError::Port),
        },
    };
    Ok((host, port))
}

/// A path in its one spelling: no dot segments, what needs no percent-encoding has none, and what needs it has it in upper case.
fn normal_path(path: &str) -> Result<String, UrlError> {
    const HEX: [u8; 16] = *b"0123456789ABCDEF";
    let mut spelled = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(first) = bytes.next() {
        let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16)).ok_or(UrlError::Encoding);
        let (byte, encoded) = match first {
            b'%' => ((digit()? << 4 | digit()?) as u8, true),
            byte => (byte, false),
        };
        let unreserved = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
        if unreserved || byte.is_ascii_graphic() && !encoded {
            spelled.push(char::from(byte));
        } else {
            let digits = [byte >> 4, byte & 15].map(|half| char::from(HEX[usize::from(half)]));
            spelled.push('%');
            spelled.extend(digits);
        }
    }
    let mut segments: Vec<&str> = Vec::new();
    for segment in spelled.split('/').skip(1) {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    Ok(segments.iter().flat_map(|segment| ["/", segment]).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_engine_is_one_url_however_it_is_spelled() {
        for text in ["http://Prefill-0:8000", "http://prefill-0:8000/", "http://PREFILL-0:8000//"] {
            assert_eq!(WorkerUrl::parse(text).unwrap().as_str(), "http://prefill-0:8000");
        }
        for text in ["http://[FD00::1]:8000", "http://[fd00:0:0:0:0:0:0:1]:08000"] {
            assert_eq!(WorkerUrl::parse(text).unwrap().as_str(), "http://[fd00::1]:8000");
        }
    }

    #[test]
    fn what_the_scheme_implies_and_what_needs_no_encoding_is_not_spelled_out() {
        for (text, normal) in [
            ("http://h:80", "http://h"),
            ("http://H:080/", "http://h"),
            ("https://h:443/v", "https://h/v"),
            ("https://h:80", "https://h:80"),
            ("grpc://h:443", "grpc://h:443"),
            ("http://[::1]:80/", "http://[::1]"),
            ("http://h/%7Euser/%61", "http://h/~user/a"),
            ("http://h/a%2fb%3f", "http://h/a%2Fb%3F"),
            ("http://h/é", "http://h/%C3%A9"),
            ("http://h/a/./b/../c/", "http://h/a/c"),
            ("http://h/../%2e%2E/a", "http://h/a"),
            ("http://h/a//b", "http://h/a//b"),
        ] {
            let url = WorkerUrl::parse(text).unwrap();
            assert_eq!(url.as_str(), normal, "{text}");
            assert_eq!(WorkerUrl::parse(normal).unwrap(), url, "the normal form is its own");
        }
    }

    #[test]
    fn an_ipv6_host_keeps_its_brackets() {
        let url = WorkerUrl::parse("http://[::1]:8000/base/").unwrap();
        assert_eq!((url.host(), url.port(), url.as_str()), ("[::1]", Some(8000), "http://[::1]:8000/base"));
    }

    #[test]
    fn what_is_not_a_worker_address_is_refused_with_its_reason() {
        let long = format!("http://h/{}", "a".repeat(MAX_URL_BYTES));
        let cases = [
            ("", UrlError::Scheme),
            ("h:8000", UrlError::Scheme),
            ("HTTP://h", UrlError::Scheme),
            ("http://", UrlError::Host),
            ("http://:80", UrlError::Host),
            ("http://[fd00::1", UrlError::Host),
            ("http://fd00::1:8000", UrlError::Port),
            ("http://h:0", UrlError::Port),
            ("http://h:99999", UrlError::Port),
            ("http://h:+1", UrlError::Port),
            ("http://h/%4", UrlError::Encoding),
            ("http://h/%zz", UrlError::Encoding),
            ("http://h%41", UrlError::Host),
            ("http://u:p@h:1", UrlError::Extra),
            ("http://h/?q", UrlError::Extra),
            ("http://h /", UrlError::Extra),
            (long.as_str(), UrlError::TooLong),
        ];
        for (text, expected) in cases {
            assert_eq!(WorkerUrl::parse(text).unwrap_err(), expected, "{text}");
        }
    }
}
