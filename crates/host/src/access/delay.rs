//! Responses that are delayed while work goes on (`?wait=`). A route decides its request, and returns the response to it
//! together with what the response waits for.
//!
//! Invariant: the line in the audit log is written before the delay begins, and the delay ends with its connection.

use crate::error::HostError;
use axum::response::{IntoResponse, Response};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

type LaterResponse = Pin<Box<dyn Future<Output = Response> + Send>>;

/// What a response waits for. It is a part of the response until it is sent.
#[derive(Clone)]
struct ResponseDelay(Arc<Mutex<Option<LaterResponse>>>);

/// Returns the response `now`, which the caller gets as it is `later`.
pub fn delayed<R: IntoResponse>(
    now: impl IntoResponse,
    later: impl Future<Output = Result<R, HostError>> + Send + 'static,
) -> Response {
    let later: LaterResponse = Box::pin(async { later.await.into_response() });
    let mut response = now.into_response();
    response.extensions_mut().insert(ResponseDelay(Arc::new(Mutex::new(Some(later)))));
    response
}

/// Waits until the response can be sent.
pub async fn wait(mut response: Response) -> Response {
    let delay = response.extensions_mut().remove::<ResponseDelay>();
    let later =
        delay.and_then(|delay| delay.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take());
    match later {
        Some(later) => later.await,
        None => response,
    }
}
