//! Checking refusals: status, code and words, in the shape of the API that was asked.

use reqwest::Response;
use serde_json::{Value, json};

/// Checks an error in the documented envelope and returns its message.
pub async fn refused(response: Response, status: u16, code: &str) -> String {
    let headers = response.headers().clone();
    let found = response.status().as_u16();
    let text = response.text().await.unwrap();
    assert_eq!(found, status, "{text}");
    assert_eq!(headers["x-smg-error-code"], code, "{text}");
    assert!(headers["content-type"].to_str().unwrap().starts_with("application/json"), "{headers:?}");
    assert!(headers.get("x-request-id").is_some_and(|id| !id.is_empty()), "{headers:?}");
    let body: Value = serde_json::from_str(&text).unwrap();
    let kind = match status {
        403 => "permission_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    let message = body["error"]["message"].as_str().unwrap().to_owned();
    assert_eq!(body, json!({"error": {"type": kind, "code": code, "message": message, "param": null}}));
    assert!(!message.is_empty());
    message
}

/// Checks an error of the admin plane and returns its message.
pub async fn admin_refused(response: Response, status: u16, code: &str) -> String {
    let (found, content_type) = (response.status().as_u16(), response.headers()["content-type"].clone());
    assert!(response.headers().contains_key("x-request-id"));
    let body: Value = response.json().await.unwrap();
    assert_eq!((found, &body["code"]), (status, &json!(code)), "{body}");
    assert!(content_type.to_str().unwrap().starts_with("application/json"));
    body["error"].as_str().filter(|words| !words.is_empty()).unwrap().to_owned()
}
