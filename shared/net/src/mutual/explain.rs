//! What went wrong between two parts, in words that say what to do.
//!
//! A server judges a client's certificate after the client believes the connection to be made (TLS 1.3), so its refusal arrives in the place of
//! the first byte. It is kept apart from a connection that broke: what was sent over a refused one was never looked at.

use std::error::Error;
use std::io;

use rustls::{AlertDescription, CertificateError, InvalidMessage};
use thiserror::Error;

/// The other side refused the connection before it looked at anything sent over it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Refused(pub(super) String);

/// Whether an error comes from a connection that was refused: nothing that was sent has arrived.
pub fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    find(error, |error| error.is::<Refused>().then_some(())).is_some()
}

/// Looks for something among an error and its causes.
fn find<T>(error: &(dyn Error + 'static), mut look: impl FnMut(&(dyn Error + 'static)) -> Option<T>) -> Option<T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = look(error) {
            return Some(found);
        }
        // An I/O error names the causes of what it carries, and not that itself.
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

/// Why a connection was not made, or broke at its first byte.
pub(super) fn explain(error: &io::Error) -> String {
    match find(error, |error| error.downcast_ref::<rustls::Error>().map(of_tls)) {
        Some(text) => text,
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the other side closed the connection before TLS was agreed on".to_owned()
        }
        None => error.to_string(),
    }
}

/// Whether the other side has refused a connection.
pub(super) fn refusal(error: &io::Error) -> Option<Refused> {
    let alert = find(error, |error| match error.downcast_ref::<rustls::Error>() {
        Some(error @ rustls::Error::AlertReceived(_)) => Some(error.clone()),
        _ => None,
    })?;
    Some(Refused(of_tls(&alert)))
}

fn of_tls(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion) => {
            "the other side does not speak TLS: is it run with --insecure?".to_owned()
        }
        rustls::Error::InvalidCertificate(error) => of_certificate(error),
        rustls::Error::NoCertificatesPresented => "the other side has presented no certificate".to_owned(),
        rustls::Error::AlertReceived(alert) => of_alert(*alert),
        other => other.to_string(),
    }
}

fn of_certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the certificate of the other side has expired".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the certificate of the other side is not valid yet: do the clocks agree?".to_owned()
        }
        // A bad signature is that of an authority of the same name.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the certificate of the other side comes from no authority in this side's ca.crt".to_owned()
        }
        CertificateError::Other(other) => other.0.to_string(),
        other => format!("the certificate of the other side cannot be used: {other}"),
    }
}

fn of_alert(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "this side's certificate comes from no authority in the other side's ca.crt".to_owned()
        }
        AlertDescription::CertificateExpired => "this side's certificate has expired, says the other side".to_owned(),
        AlertDescription::CertificateRequired => {
            "the other side wants a certificate, and this side has none".to_owned()
        }
        AlertDescription::ProtocolVersion => "the other side does not speak TLS 1.3".to_owned(),
        other => format!("the other side refuses this side's certificate ({other:?})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Error)]
    #[error("outer")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_refusal_is_found_however_deep_it_lies() {
        let refused = Outer(io::Error::other(Outer(io::Error::other(Refused("no".to_owned())))));
        assert!(is_refusal(&refused));
        assert!(!is_refusal(&Outer(io::Error::other("broken"))));
    }

    #[test]
    fn an_alert_of_the_other_side_is_a_refusal_and_a_fault_of_this_one_is_none() {
        let alert = io::Error::other(rustls::Error::AlertReceived(AlertDescription::UnknownCA));
        assert!(refusal(&alert).is_some());
        assert!(explain(&alert).contains("no authority in the other side's ca.crt"));
        let plain = io::Error::other(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType));
        assert_eq!(refusal(&plain), None);
        assert!(explain(&plain).contains("--insecure"));
    }
}
