//! Parsers of single flag values. Each returns the value or the rule it breaks, as clap wants it.

use smg_net::mutual::identity::{self, Part};

/// A finite number of at least one, such as a backoff multiplier.
pub(super) fn at_least_one(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 1.0 => Ok(value),
        _ => Err("must be a finite number of at least 1".to_owned()),
    }
}

/// A share from zero to one, such as a jitter factor.
pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

/// A share above zero, such as a threshold.
pub(super) fn positive_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("must be a number above 0 and at most 1".to_owned()),
    }
}

/// A finite number above zero, such as a histogram bound.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("must be a finite number above 0".to_owned()),
    }
}

/// A finite number of at least zero, such as a weight.
pub(super) fn amount(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a finite number of at least 0".to_owned()),
    }
}

/// The path part of a URL.
pub(super) fn url_path(text: &str) -> Result<String, String> {
    if text.starts_with('/') && !text.contains(|c: char| c.is_whitespace() || c.is_control()) {
        Ok(text.to_owned())
    } else {
        Err("must be a path that starts with `/`".to_owned())
    }
}

/// An HTTP header name, in lower case.
pub(super) fn header_name(text: &str) -> Result<String, String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_token) {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("is not a valid HTTP header name".to_owned())
    }
}

/// `HOST:PORT` or a bare host; the port of the control plane's API is added where none is given.
pub(super) fn control_plane_address(text: &str) -> Result<String, String> {
    address(text, 7400)
}

/// As [`control_plane_address`], or a URL with a host and perhaps a port.
pub(super) fn admin_address(text: &str) -> Result<String, String> {
    let text = text.trim_end_matches('/');
    match text.split_once("://") {
        Some(("http", rest)) => Ok(format!("http://{}", address(rest, 80)?)),
        Some(("https", rest)) => Ok(format!("https://{}", address(rest, 443)?)),
        Some(_) => Err("must be HOST:PORT, http://HOST:PORT or https://HOST:PORT".to_owned()),
        None => control_plane_address(text),
    }
}

/// `HOST:PORT` or a bare host; the port of the members among themselves is added where none is given.
pub(super) fn peer_address(text: &str) -> Result<String, String> {
    address(text, 7401)
}

/// What a part of the fleet is.
pub(super) fn part(text: &str) -> Result<Part, String> {
    Part::from_name(text).ok_or_else(|| "must be controlplane, gateway or admin".to_owned())
}

/// What a part of the fleet is called in its certificate.
pub(super) fn part_name(text: &str) -> Result<String, String> {
    let rule = || "must be letters, digits, `.`, `-` and `_`".to_owned();
    if identity::is_name(text) { Ok(text.to_owned()) } else { Err(rule()) }
}

/// What a cluster is called in certificates.
pub(super) fn cluster_name(text: &str) -> Result<String, String> {
    let rule = || "must be lower-case letters, digits, `.`, `-` and `_`".to_owned();
    if identity::is_cluster_name(text) { Ok(text.to_owned()) } else { Err(rule()) }
}

/// A host name or an address without a port; one of IPv6 gets its brackets.
pub(super) fn host(text: &str) -> Result<String, String> {
    if text.parse::<std::net::Ipv6Addr>().is_ok() {
        return Ok(format!("[{text}]"));
    }
    let named = address(text, 1)?;
    if named == format!("{text}:1") { Ok(text.to_owned()) } else { Err("must be a host without a port".to_owned()) }
}

fn address(text: &str, default_port: u16) -> Result<String, String> {
    let rule = || "must be HOST:PORT, a host name, or [IPV6]:PORT".to_owned();
    // The colon that ends the host: none in a bare name, and never one inside the brackets of an IPv6 address.
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse::<u16>().map_err(|_| rule())?),
        _ => (text, default_port),
    };
    let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
    let plain = !host.is_empty() && !host.contains(|c: char| matches!(c, ':' | '/' | '[' | ']') || c.is_whitespace());
    if port != 0 && (bracketed || plain) { Ok(format!("{host}:{port}")) } else { Err(rule()) }
}
