//! The control endpoint of a proxy: its figures, and its model while it runs. Owns the addresses and what they answer.

use super::exchange::{Answer, read_body, whole};
use super::model::StoreModel;
use super::origin::empty;
use super::proxy::Running;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde::Serialize;
use std::sync::Arc;

/// Largest model, in bytes.
const MOST_MODEL_BYTES: usize = 1 << 20;

/// Answers a request for the control endpoint.
pub async fn answer(running: Arc<Running>, request: Request<Incoming>) -> Response<Answer> {
    let (head, body) = request.into_parts();
    whole(match (head.method, head.uri.path()) {
        (Method::GET, "/figures") => json(&running.exchange.counters.figures()),
        (Method::DELETE, "/figures") => {
            running.exchange.counters.clear();
            empty(StatusCode::NO_CONTENT)
        }
        (Method::GET, "/model") => json(&running.exchange.model()),
        (Method::POST, "/model") => {
            let bytes = read_body(body, MOST_MODEL_BYTES).await.unwrap_or_default();
            let model = serde_json::from_slice::<StoreModel>(&bytes).map_err(|e| e.to_string());
            let done = match model {
                Ok(model) => running.set_model(model).await,
                Err(why) => Err(why),
            };
            match done {
                Ok(()) => empty(StatusCode::NO_CONTENT),
                Err(why) => refused(&why),
            }
        }
        _ => empty(StatusCode::NOT_FOUND),
    })
}

fn json(value: &impl Serialize) -> Response<Bytes> {
    let mut text = serde_json::to_string_pretty(value).expect("it has only numbers and texts");
    text.push('\n');
    let mut answer = Response::new(text.into());
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

fn refused(why: &str) -> Response<Bytes> {
    let mut answer = empty(StatusCode::BAD_REQUEST);
    *answer.body_mut() = format!("this is no model: {why}\n").into();
    answer
}
