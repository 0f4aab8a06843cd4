//! Extractors that check the contents of a request. Owns the texts of their errors.

use super::conditions::header_parameter;
use crate::access::note::RequestNote;
use crate::error::HostError;
use crate::idempotency::IdempotentRequest;
use crate::paging::{PageRequest, name_of};
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spillway_api::bounds::{self, Bounded};
use spillway_api::client::IDEMPOTENCY_KEY;
use spillway_api::{ErrorCode, Name, Selector};
use std::time::Duration;
use utoipa::openapi::path::{Parameter, ParameterIn};

/// Longest `Idempotency-Key`.
const MOST_KEY_CHARACTERS: usize = 128;
/// Default number of objects on a page.
const PAGE: usize = 500;
/// Longest time until a body is complete.
const BODY: Duration = Duration::from_secs(30);

/// A JSON body whose numbers are within their bounds. It is noted for the audit log.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned + Serialize + Bounded, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = HostError;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, HostError> {
        let note = request.extensions().get::<RequestNote>().cloned();
        let value: T = parse(request, state).await?;
        note.into_iter().for_each(|note| note.asked(&value));
        checked(value).map(Body)
    }
}

/// A JSON body that may have secrets anywhere: its route notes what is none.
pub struct SecretBody<T>(pub T);

impl<T: DeserializeOwned + Bounded, S: Send + Sync> FromRequest<S> for SecretBody<T> {
    type Rejection = HostError;

    async fn from_request(request: Request, state: &S) -> Result<SecretBody<T>, HostError> {
        checked(parse(request, state).await?).map(SecretBody)
    }
}

fn checked<T: Bounded>(value: T) -> Result<T, HostError> {
    value.check_bounds().map_err(|e| HostError::invalid(e.to_string()))?;
    Ok(value)
}

async fn parse<T: DeserializeOwned, S: Send + Sync>(request: Request, state: &S) -> Result<T, HostError> {
    is_json(request.headers())?;
    let bytes = tokio::time::timeout(BODY, Bytes::from_request(request, state)).await;
    let bytes = bytes.map_err(|_| late(BODY))?.map_err(|e: BytesRejection| {
        let too_large = e.status() == StatusCode::PAYLOAD_TOO_LARGE;
        let code = if too_large { ErrorCode::TooLarge } else { ErrorCode::Invalid };
        HostError::new(code, format!("the request's body: {}", e.body_text()))
    })?;
    serde_json::from_slice(&bytes).map_err(|e| HostError::invalid(format!("the request's body: {e}")))
}

fn late(patience: Duration) -> HostError {
    let message = format!("the request's body did not come within {} s", patience.as_secs());
    HostError::new(ErrorCode::Timeout, message)
}

/// Receives a body of any type and at most so many bytes, within this time.
pub async fn raw_body(body: axum::body::Body, most: usize, patience: Duration) -> Result<Bytes, HostError> {
    let received = tokio::time::timeout(patience, Limited::new(body, most).collect()).await;
    received.map_err(|_| late(patience))?.map(|body| body.to_bytes()).map_err(|e| {
        match e.is::<LengthLimitError>() {
            true => {
                let message = format!("the request's body is larger than {} MiB", most >> 20);
                HostError::new(ErrorCode::TooLarge, message)
            }
            false => HostError::invalid(format!("the request's body: {e}")),
        }
    })
}

/// Refuses a body with another content type than JSON.
fn is_json(headers: &HeaderMap) -> Result<(), HostError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let text = value.to_str().unwrap_or_default();
    let essence = text.split(';').next().unwrap_or_default().trim_ascii().to_ascii_lowercase();
    match essence.strip_prefix("application/") {
        Some(kind) if kind == "json" || kind.ends_with("+json") => Ok(()),
        _ => {
            let text = text.escape_debug();
            let message = format!(
                "the request's body is said to be '{text}': send JSON with 'Content-Type: application/json'"
            );
            Err(HostError::new(ErrorCode::UnsupportedMediaType, message))
        }
    }
}

/// Named parts of a path.
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Path<T>, HostError> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        path.map(|path| Path(path.0)).map_err(|e: PathRejection| HostError::invalid(e.body_text()))
    }
}

/// Query parameters. They are noted for the audit log.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Query<T>, HostError> {
        let query = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        let query = query.map_err(|e: QueryRejection| HostError::invalid(e.body_text()))?;
        if let (Some(note), Some(text)) = (parts.extensions.get::<RequestNote>(), parts.uri.query()) {
            note.asked_beside(text);
            let dry_run = axum::extract::Query::<AnyDryRun>::try_from_uri(&parts.uri);
            if dry_run.is_ok_and(|query| query.0.dry_run) {
                note.dry_run();
            }
        }
        Ok(Query(query.0))
    }
}

/// The parameter `dry_run` of a query with any other parameters.
#[derive(Deserialize)]
struct AnyDryRun {
    #[serde(default)]
    dry_run: bool,
}

/// Query parameters that select a page of a list, for the OpenAPI document.
#[derive(utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document")]
pub struct PageQuery {
    /// How many objects a page has at most. By default 500.
    #[param(required = false)]
    limit: u32,
    /// The `next` of the page before this one; the first page if it is absent.
    #[param(required = false, pattern = "^[A-Za-z0-9_-]{0,256}$")]
    r#continue: String,
}

/// Idempotency key of a request, if the client gives one: `Idempotency-Key: 8e03978e`.
pub struct IdempotencyKey(Option<String>);

impl IdempotencyKey {
    /// The key itself.
    pub fn text(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// Combines the key with the caller, the route and the request.
    pub fn of(&self, caller: &str, route: &str, body: &impl Serialize) -> IdempotentRequest {
        self.0
            .as_ref()
            .map_or_else(IdempotentRequest::default, |key| IdempotentRequest::new(caller, route, key, body))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = HostError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<IdempotencyKey, HostError> {
        let mut values = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
        let Some(value) = values.next() else { return Ok(IdempotencyKey(None)) };
        let text = value.to_str().unwrap_or_default();
        let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
        let key = quoted.unwrap_or(text);
        let is_plain = key.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
        match is_plain && (1..=MOST_KEY_CHARACTERS).contains(&key.len()) && values.next().is_none() {
            true => Ok(IdempotencyKey(Some(key.into()))),
            false => Err(HostError::invalid(format!(
                "Idempotency-Key: give one key of 1 to {MOST_KEY_CHARACTERS} visible ASCII characters without quotes"
            ))),
        }
    }
}

impl utoipa::IntoParams for IdempotencyKey {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let words = "A name of the client's for this request: a request that repeats it within a day does nothing and gets the result of the first one.";
        header_parameter("Idempotency-Key", words, r"^[!#-\[\]-~]{1,128}$")
    }
}

/// How long the response to a request is delayed while its work goes on.
#[derive(Clone, Copy, Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Wait {
    /// How many seconds the answer is held back until the work has ended. Without it, or with 0, the answer comes at once. The
    /// work goes on either way.
    #[serde(default)]
    wait: u32,
}

impl Wait {
    /// Longest delay of the response.
    pub fn at_most(self) -> Result<Duration, HostError> {
        let checked = bounds::WAIT_SECONDS.check("wait", self.wait.into());
        checked.map_err(|e| HostError::invalid(e.to_string()))?;
        Ok(Duration::from_secs(self.wait.into()))
    }
}

/// Whether the request only checks what would happen.
#[derive(Clone, Copy, Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DryRun {
    /// With `true` the request is checked in full and nothing is changed; the answer is what the change would make.
    #[serde(default)]
    pub dry_run: bool,
}

/// Takes the parameters that select a page out of the query.
pub fn part(pairs: &mut Vec<(String, String)>) -> Result<PageRequest, HostError> {
    let mut part = PageRequest { after: String::new(), most: PAGE };
    for (word, value) in pairs.extract_if(.., |(word, _)| word == "limit" || word == "continue") {
        if word == "limit" {
            let most = value.parse().map_err(|_| HostError::invalid("limit: it is a number"))?;
            bounds::LIMIT.check("limit", most).map_err(|e| HostError::invalid(e.to_string()))?;
            part.most = most as usize;
        } else {
            let unknown =
                || HostError::invalid("continue: give the value `next` of the previous page unchanged");
            part.after = name_of(&value).ok_or_else(unknown)?;
        }
    }
    Ok(part)
}

/// Parses the query parameters that select objects; refuses unknown ones.
pub fn select(pairs: Vec<(String, String)>, words: &[&str]) -> Result<Selector, HostError> {
    let mut selector = Selector::default();
    for (word, value) in pairs {
        let name = |text: &str| text.parse::<Name>().map_err(|e| HostError::invalid(format!("{word}: {e}")));
        match word.as_str() {
            "catalog" if words.contains(&"catalog") => selector.catalog = Some(name(&value)?),
            "label" if words.contains(&"label") => {
                let (key, value) = value.split_once('=').ok_or_else(|| {
                    HostError::invalid(format!("label: '{}' is not KEY=VALUE", value.escape_debug()))
                })?;
                let earlier = selector.labels.insert(name(key)?, value.to_owned());
                if earlier.is_some_and(|earlier| earlier != value) {
                    return Err(HostError::invalid(format!("label: {key} cannot have two values")));
                }
            }
            _ => {
                let word = word.escape_debug();
                let known =
                    words.iter().chain(&["limit", "continue"]).copied().collect::<Vec<_>>().join(", ");
                return Err(HostError::invalid(format!("'{word}' is not a known parameter: {known}")));
            }
        }
    }
    Ok(selector)
}
