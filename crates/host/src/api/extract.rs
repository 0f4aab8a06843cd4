//! What a request carries, checked. Owns the words of a refusal.

use crate::error::HostError;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use spillway_api::ErrorCode;
use std::time::Duration;

/// How long a body may take to come.
const BODY: Duration = Duration::from_secs(30);

/// A body: JSON, whatever its content type says.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = HostError;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, HostError> {
        let bytes = tokio::time::timeout(BODY, Bytes::from_request(request, state)).await;
        let late =
            |_| HostError::invalid(format!("the request's body did not come within {} s", BODY.as_secs()));
        let bytes = bytes.map_err(late)?.map_err(|e: BytesRejection| {
            let too_large = e.status() == StatusCode::PAYLOAD_TOO_LARGE;
            let code = if too_large { ErrorCode::TooLarge } else { ErrorCode::Invalid };
            HostError::new(code, format!("the request's body: {}", e.body_text()))
        })?;
        let value = serde_json::from_slice(&bytes);
        value.map(Body).map_err(|e| HostError::invalid(format!("the request's body: {e}")))
    }
}

/// The parts of a path that have names.
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Path<T>, HostError> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        path.map(|path| Path(path.0)).map_err(|e: PathRejection| HostError::invalid(e.body_text()))
    }
}

/// What follows the question mark.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Query<T>, HostError> {
        let query = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        query.map(|query| Query(query.0)).map_err(|e: QueryRejection| HostError::invalid(e.body_text()))
    }
}
