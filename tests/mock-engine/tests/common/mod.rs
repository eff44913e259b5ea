//! What the tests share: an HTTP client, a raw client, and pairs of engines.
#![allow(dead_code)]

use std::time::Duration;

use mock_engine::{Builder, Connector, Engine, MockEngine, Role};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Long enough for anything that will happen.
pub const SOON: Duration = Duration::from_secs(10);

pub fn sglang(role: Role) -> Builder {
    MockEngine::builder().engine(Engine::Sglang).role(role)
}

pub fn vllm(role: Role, connector: Connector) -> Builder {
    MockEngine::builder().engine(Engine::Vllm).role(role).connector(connector)
}

pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap()
    }

    /// The JSON of each `data:` event but the end marker.
    pub fn events(&self) -> Vec<Value> {
        assert!(self.text.ends_with("data: [DONE]\n\n"), "{}", self.text);
        self.text
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

pub async fn post(engine: &MockEngine, path: &str, body: &Value) -> Answer {
    try_post(engine, path, body).await.unwrap()
}

pub async fn try_post(engine: &MockEngine, path: &str, body: &Value) -> Result<Answer, reqwest::Error> {
    let request = reqwest::Client::new().post(engine.url() + path).header("x-request-id", "one").json(body);
    read(request).await
}

pub async fn get(engine: &MockEngine, path: &str) -> Answer {
    read(reqwest::Client::new().get(engine.url() + path)).await.unwrap()
}

pub async fn read(request: reqwest::RequestBuilder) -> Result<Answer, reqwest::Error> {
    let response = request.send().await?;
    Ok(Answer { status: response.status().as_u16(), headers: response.headers().clone(), text: response.text().await? })
}

pub fn chat(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8})
}

pub fn completion(text: &str) -> Value {
    json!({"model": "m", "prompt": text, "max_tokens": 8})
}

/// `body` with more fields.
pub fn with(mut body: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The keys of an object in the order they were written. `serde_json` sorts them, so the text is looked at.
pub fn keys(object: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let (mut depth, mut in_string, mut escaped, mut start) = (0, false, false, 0);
    let bytes = object.as_bytes();
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => {
                if in_string && depth == 1 && bytes.get(at + 1) == Some(&b':') {
                    keys.push(object[start..at].to_owned());
                }
                in_string = !in_string;
                start = at + 1;
            }
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth -= 1,
            _ => {}
        }
    }
    keys
}

/// The text of the first object that follows `name` in `json`.
pub fn part<'a>(json: &'a str, name: &str) -> &'a str {
    let at = json.find(&format!("\"{name}\":")).unwrap();
    let start = at + json[at..].find('{').unwrap();
    let (mut depth, mut in_string) = (0, false);
    for (offset, character) in json[start..].char_indices() {
        match character {
            '"' => in_string = !in_string,
            '{' if !in_string => depth += 1,
            '}' if !in_string => {
                depth -= 1;
                if depth == 0 {
                    return &json[start..=start + offset];
                }
            }
            _ => {}
        }
    }
    panic!("{name} is not closed in {json}");
}

/// A connection under the test's control.
pub struct Raw(pub TcpStream);

impl Raw {
    pub async fn connect(engine: &MockEngine) -> Self {
        Raw(TcpStream::connect(("127.0.0.1", engine.port())).await.unwrap())
    }

    pub async fn post(engine: &MockEngine, path: &str, body: &Value) -> Self {
        let mut raw = Self::connect(engine).await;
        raw.send(path, body).await;
        raw
    }

    pub async fn send(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nX-Twice: a\r\nx-Other: b\r\nX-Twice: c\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.0.write_all((head + &body).as_bytes()).await.unwrap();
    }

    /// Everything until the end of the connection, and how that came.
    pub async fn end(&mut self) -> (Vec<u8>, std::io::Result<()>) {
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        let reading = async {
            loop {
                match self.0.read(&mut buffer).await {
                    Ok(0) => return Ok(()),
                    Ok(length) => bytes.extend_from_slice(&buffer[..length]),
                    Err(error) => return Err(error),
                }
            }
        };
        let end = tokio::time::timeout(SOON, reading).await.unwrap();
        (bytes, end)
    }

    /// Reads until `text` has come.
    pub async fn until(&mut self, text: &str) -> String {
        let mut bytes = Vec::new();
        let reading = async {
            let mut buffer = [0; 4096];
            loop {
                let length = self.0.read(&mut buffer).await.unwrap();
                assert!(length > 0, "closed after {}", String::from_utf8_lossy(&bytes));
                bytes.extend_from_slice(&buffer[..length]);
                let so_far = String::from_utf8_lossy(&bytes);
                if so_far.contains(text) {
                    return so_far.into_owned();
                }
            }
        };
        tokio::time::timeout(SOON, reading).await.unwrap()
    }
}
