//! Conditional requests (RFC 9110, 13): entity tags of objects, and the conditions of a request.
//!
//! Invariant: a condition is checked in the transaction that makes the change.

use crate::error::HostError;
use crate::tags::Tag;
use axum::Json;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::openapi::Required;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};

/// A response with an object and its tag.
pub struct Tagged<T>(pub Tag, pub T);

impl<T: Serialize> IntoResponse for Tagged<T> {
    fn into_response(self) -> Response {
        let Tagged(tag, object) = self;
        let tag = HeaderValue::try_from(tag.to_string()).expect("digits can be in a header");
        ([(header::ETAG, tag)], Json(object)).into_response()
    }
}

/// Tag of the object when the client read it, if given: `If-Match: "12"`.
pub struct IfMatch(pub Option<Tag>);

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<IfMatch, HostError> {
        let refused = || HostError::invalid("If-Match: give one tag, such as \"12\", or *");
        let Some(text) = only(parts, header::IF_MATCH, refused)? else { return Ok(IfMatch(None)) };
        match text.as_str() {
            // Any existing object matches; a missing one is not found anyway.
            "*" => Ok(IfMatch(None)),
            tag => Ok(IfMatch(Some(tag.parse().map_err(|()| refused())?))),
        }
    }
}

/// Whether the object must not exist yet: `If-None-Match: *`.
pub struct IfNoneMatch(pub bool);

impl<S: Send + Sync> FromRequestParts<S> for IfNoneMatch {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<IfNoneMatch, HostError> {
        let refused = || {
            HostError::invalid("If-None-Match: only * is supported, for an object that must not exist yet")
        };
        match only(parts, header::IF_NONE_MATCH, refused)?.as_deref() {
            None => Ok(IfNoneMatch(false)),
            Some("*") => Ok(IfNoneMatch(true)),
            Some(_) => Err(refused()),
        }
    }
}

/// Value of a header that may be given once.
fn only(
    parts: &Parts,
    name: HeaderName,
    refused: impl Fn() -> HostError,
) -> Result<Option<String>, HostError> {
    let mut values = parts.headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    match (value.to_str(), values.next()) {
        (Ok(text), None) => Ok(Some(text.to_owned())),
        _ => Err(refused()),
    }
}

/// Describes a request header for the OpenAPI document.
pub fn header_parameter(name: &str, description: &str, pattern: &str) -> Vec<Parameter> {
    let parameter = ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(description))
        .schema(Some(ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern))));
    vec![parameter.build()]
}

impl utoipa::IntoParams for IfMatch {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let words = "The tag of the object that this request was decided on, such as \"12\", from the header `ETag`. If the \
                     object has another tag by now nothing is done: `precondition_failed`.";
        header_parameter("If-Match", words, r#"^("[0-9]{1,19}"|\*)$"#)
    }
}

impl utoipa::IntoParams for IfNoneMatch {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let words = "With `*` the request only creates: if the object exists already nothing is done: `precondition_failed`.";
        header_parameter("If-None-Match", words, r"^\*$")
    }
}
