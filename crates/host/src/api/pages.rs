//! The files of the web console, which are a part of this program. Owns their headers. Nothing in them is secret: whoever reaches the
//! daemon may have them, and all that they show they ask of the API.
//!
//! Invariant: a page loads nothing, and sends nothing, that is not of this daemon.

use super::ApiState;
use crate::error::HostError;
use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use spillway_api::ErrorCode;
use std::io::Write;
use std::sync::LazyLock;

/// A file as it is built, with its type.
struct Source {
    name: &'static str,
    content_type: &'static str,
    bytes: &'static [u8],
}

macro_rules! sources {
    ($($name:literal: $content_type:literal,)+) => {
        /// All files of `console/dist`. Its folder `cockpit` is not of this program: the package for Cockpit has it.
        const SOURCES: &[Source] = &[$(Source {
            name: $name,
            content_type: $content_type,
            bytes: include_bytes!(concat!("../../../../console/dist/", $name)),
        },)+];
    };
}

sources! {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "fleet.js": "text/javascript; charset=utf-8",
    "hints.json": "application/json",
    "index.html": "text/html; charset=utf-8",
    "licences.txt": "text/plain; charset=utf-8",
    "screen.css": "text/css; charset=utf-8",
    "screen.html": "text/html; charset=utf-8",
    "screen.js": "text/javascript; charset=utf-8",
    "serial.css": "text/css; charset=utf-8",
    "serial.html": "text/html; charset=utf-8",
    "serial.js": "text/javascript; charset=utf-8",
}

/// What pages may load and do (CSP level 3): only what is of this daemon, no inline scripts or styles, no forms, in no frame of others.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      font-src 'self'; frame-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'self'";
/// The same for the page of a serial console, whose library makes its own style elements.
const SERIAL_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
                             connect-src 'self'; font-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'self'";

/// A file as it is sent.
struct Served {
    source: &'static Source,
    plain: Encoded,
    gzip: Encoded,
}

struct Encoded {
    bytes: Bytes,
    tag: HeaderValue,
}

impl Encoded {
    fn new(bytes: Bytes) -> Encoded {
        let digest: String =
            Sha256::digest(&bytes).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let tag = HeaderValue::try_from(format!("\"{digest}\"")).expect("digits can be in a header");
        Encoded { bytes, tag }
    }
}

/// Compressed once, when the first of them is asked for.
static SERVED: LazyLock<Vec<Served>> = LazyLock::new(|| {
    let served = |source: &'static Source| {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
        gzip.write_all(source.bytes).expect("memory takes all");
        let gzip = gzip.finish().expect("memory takes all");
        Served {
            source,
            plain: Encoded::new(Bytes::from_static(source.bytes)),
            gzip: Encoded::new(gzip.into()),
        }
    };
    SOURCES.iter().map(served).collect()
});

/// Routes that need no caller to be known.
pub fn routes() -> Router<ApiState> {
    Router::new()
        .route("/", get(async || Redirect::to("/console/")))
        .route("/console", get(async || Redirect::to("/console/")))
        .route("/console/", get(async |headers: HeaderMap| file("index.html", &headers)))
        .route(
            "/console/{name}",
            get(async |Path(name): Path<String>, headers: HeaderMap| file(&name, &headers)),
        )
}

fn file(name: &str, headers: &HeaderMap) -> Response {
    let Some(served) = SERVED.iter().find(|served| served.source.name == name) else {
        let message = format!("the console has no file '{}'", name.escape_debug());
        return HostError::new(ErrorCode::NotFound, message).into_response();
    };
    let accepted =
        headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_gzip = accepted.split(',').any(|coding| coding.trim() == "gzip");
    let encoded = if is_gzip { &served.gzip } else { &served.plain };
    let policy = if name == "serial.html" { SERIAL_POLICY } else { POLICY };
    let text = HeaderValue::from_static;
    let mut response = if headers.get(header::IF_NONE_MATCH) == Some(&encoded.tag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        encoded.bytes.clone().into_response()
    };
    let own = response.headers_mut();
    own.insert(header::CONTENT_TYPE, text(served.source.content_type));
    own.insert(header::ETAG, encoded.tag.clone());
    // Another version of this program has other files of the same names.
    own.insert(header::CACHE_CONTROL, text("no-cache"));
    own.insert(header::VARY, text("accept-encoding"));
    own.insert(header::CONTENT_SECURITY_POLICY, text(policy));
    own.insert(header::X_CONTENT_TYPE_OPTIONS, text("nosniff"));
    own.insert(header::REFERRER_POLICY, text("no-referrer"));
    own.insert("cross-origin-opener-policy", text("same-origin"));
    own.insert("cross-origin-resource-policy", text("same-origin"));
    if is_gzip {
        own.insert(header::CONTENT_ENCODING, text("gzip"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_files_that_are_built_are_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../console/dist");
        let files = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
        let files = files.filter(|entry| entry.file_type().unwrap().is_file());
        let built: BTreeSet<String> = files.map(|entry| entry.file_name().into_string().unwrap()).collect();
        let served: BTreeSet<String> = SOURCES.iter().map(|source| source.name.to_owned()).collect();
        assert_eq!(built, served);
        assert!(SOURCES.iter().all(|source| !source.bytes.is_empty()));
    }
}
