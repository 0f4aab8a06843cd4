//! Requests to web servers. Owns what may be connected to, redirects, and how failures are told.
//!
//! Invariant: a connection is made only to an address that was checked for the host of its request, and a name is looked up once
//! for that; each redirect is checked as the first address was; a redirect never leaves TLS, and takes no token to another host.

use super::unsupported;
use crate::causes::root_cause;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{AUTHORIZATION, LOCATION};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode, Url};
use spillway_registry::download::{AddressClass, SourceRule, reach, rule_for};
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const CONNECT: Duration = Duration::from_secs(10);
/// Longest time to look up a name.
const LOOK_UP: Duration = Duration::from_secs(20);
/// Longest time without a byte of an answer.
const SILENCE: Duration = Duration::from_secs(30);
const MOST_REDIRECTS: usize = 10;

/// A host with its port, and whether it is asked without TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    is_plain: bool,
    host: String,
    port: u16,
}

impl Place {
    fn shown(&self) -> String {
        let Place { is_plain, host, port } = self;
        format!("{}://{host}:{port}", if *is_plain { "http" } else { "https" })
    }
}

/// Sends requests as the rules allow.
pub struct WebClient {
    rules: Vec<SourceRule>,
    /// Clients for the addresses that were checked.
    clients: Mutex<HashMap<Place, Client>>,
}

/// Answers every question with the addresses that were checked.
struct CheckedAddresses(Vec<SocketAddr>);

impl Resolve for CheckedAddresses {
    fn resolve(&self, _: Name) -> Resolving {
        let addresses: Addrs = Box::new(self.0.clone().into_iter());
        Box::pin(std::future::ready(Ok(addresses)))
    }
}

impl WebClient {
    /// A client that connects to what these rules allow.
    pub fn new(rules: Vec<SourceRule>) -> WebClient {
        WebClient { rules, clients: Mutex::default() }
    }

    /// Rules about what is connected to.
    pub fn rules(&self) -> &[SourceRule] {
        &self.rules
    }

    /// Gets what is at an address, or where it redirects to. `shown` is for errors.
    pub async fn get(
        &self,
        shown: &str,
        url: Url,
        headers: &[(&str, &str)],
    ) -> Result<Response, RegistryError> {
        let (first, mut next) = (place_of(shown, &url)?, url);
        for _ in 0..=MOST_REDIRECTS {
            let place = place_of(shown, &next)?;
            if place.is_plain && !first.is_plain {
                let message =
                    format!("{shown}: it redirects to {}, which has no TLS: tell its owner", place.shown());
                return Err(RegistryError::new(RegistryErrorKind::Forbidden, message));
            }
            let mut request = self.client(shown, &place, place != first).await?.get(next.clone());
            for (name, value) in headers {
                // A token is for the one who gave it.
                if place == first || *name != AUTHORIZATION.as_str() {
                    request = request.header(*name, *value);
                }
            }
            let answer = request.send().await.map_err(|e| unreachable(shown, &place, e))?;
            match answer.status().as_u16() {
                301 | 302 | 303 | 307 | 308 => {}
                _ => return Ok(answer),
            }
            let to = answer.headers().get(LOCATION).and_then(|to| to.to_str().ok());
            let to = to.and_then(|to| next.join(to).ok());
            next =
                to.ok_or_else(|| unsupported(format!("{shown}: {} redirects to nowhere", place.shown())))?;
        }
        Err(unsupported(format!("{shown}: it redirects more than {MOST_REDIRECTS} times")))
    }

    /// A client for a place, if that is allowed.
    async fn client(&self, shown: &str, place: &Place, is_redirect: bool) -> Result<Client, RegistryError> {
        let known = self.clients.lock().unwrap_or_else(PoisonError::into_inner).get(place).cloned();
        if let Some(client) = known {
            return Ok(client);
        }
        let Place { is_plain, host, port } = place;
        let forbidden = |why: String| {
            let what =
                if is_redirect { format!("{shown} leads to {}", place.shown()) } else { shown.to_owned() };
            RegistryError::new(RegistryErrorKind::Forbidden, format!("{what}: {why}"))
        };
        let reach = reach(&self.rules, *is_plain, host, *port).ok_or_else(|| {
            let rule = rule_for(*is_plain, host, *port, false);
            forbidden(format!(
                "this host does not download from there: if it should, start spillwayd with --import-from {rule}"
            ))
        })?;
        let addresses = addresses_of(shown, host, *port).await?;
        let allowed: Vec<_> = addresses.iter().filter(|found| reach.includes(found.ip())).copied().collect();
        if allowed.is_empty() {
            let address = addresses.first().map(|found| found.ip());
            return Err(forbidden(why_not(place, address)));
        }
        let client = Client::builder()
            .dns_resolver(Arc::new(CheckedAddresses(allowed)))
            .redirect(Policy::none())
            .no_proxy()
            .referer(false)
            .http1_only()
            .https_only(!is_plain)
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .user_agent(concat!("spillway/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| crate::job::local(format!("{shown}: no client: {}", root_cause(&e))))?;
        self.clients.lock().unwrap_or_else(PoisonError::into_inner).insert(place.clone(), client.clone());
        Ok(client)
    }
}

/// Why no address of a host may be connected to.
fn why_not(place: &Place, address: Option<IpAddr>) -> String {
    let Some(address) = address else { return "the name has no address".into() };
    let rule = |is_local| rule_for(place.is_plain, &place.host, place.port, is_local);
    match AddressClass::of(address) {
        AddressClass::Never => format!("its address {address} is none of a host"),
        AddressClass::Local => format!(
            "its address {address} is one of this host, or of a service for this host alone: if that is meant, start spillwayd with \
             --import-from {}",
            rule(true)
        ),
        AddressClass::Private | AddressClass::Public => format!(
            "its address {address} is not public, and --import-from '*' allows only public ones: if the host is meant, start spillwayd \
             with --import-from {} too",
            rule(false)
        ),
    }
}

fn place_of(shown: &str, url: &Url) -> Result<Place, RegistryError> {
    let is_plain = match url.scheme() {
        "https" => false,
        "http" => true,
        _ => return Err(unsupported(format!("{shown}: it leads to an address that is not of a web server"))),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return Err(unsupported(format!("{shown}: it leads to an address with a user or a password")));
    }
    match (url.host_str(), url.port_or_known_default()) {
        (Some(host), Some(port)) if port != 0 => Ok(Place { is_plain, host: host.to_owned(), port }),
        _ => Err(unsupported(format!("{shown}: it leads to an address without a host"))),
    }
}

/// The addresses of a host.
async fn addresses_of(shown: &str, host: &str, port: u16) -> Result<Vec<SocketAddr>, RegistryError> {
    if let Ok(address) = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let failed = |why: String| {
        let message = format!(
            "{shown}: the name {host} cannot be looked up: {why}: is it right, and does this host reach a name server?"
        );
        RegistryError::new(RegistryErrorKind::Unreachable, message)
    };
    match tokio::time::timeout(LOOK_UP, tokio::net::lookup_host((host, port))).await {
        Ok(Ok(found)) => Ok(found.collect()),
        Ok(Err(e)) => Err(failed(e.to_string())),
        Err(_) => Err(failed("no answer".into())),
    }
}

fn unreachable(shown: &str, place: &Place, error: reqwest::Error) -> RegistryError {
    let is_timeout = error.is_timeout();
    let why = root_cause(&error.without_url());
    let advice = if why.contains("certificate") {
        "if its certificate is of an authority of your own, install that on this host (update-ca-certificates)"
    } else {
        "is it up, and does this host reach it?"
    };
    let why = if is_timeout { "no answer in time".to_owned() } else { why };
    RegistryError::new(RegistryErrorKind::Unreachable, format!("{shown}: {}: {why}: {advice}", place.shown()))
}

/// Refuses an answer without what was asked for.
pub fn check_status(shown: &str, status: StatusCode) -> Result<(), RegistryError> {
    let (kind, why) = match status.as_u16() {
        200 => return Ok(()),
        404 | 410 => (RegistryErrorKind::Absent, "it does not exist: correct the address".to_owned()),
        401 | 403 | 407 => (
            RegistryErrorKind::Denied,
            format!(
                "the server does not give it to everybody ({status}): download it with your credentials, and import the file"
            ),
        ),
        408 | 429 | 500.. => {
            (RegistryErrorKind::Unreachable, format!("the server cannot now ({status}): try again later"))
        }
        _ => {
            (RegistryErrorKind::Unsupported, format!("the server answers what is not understood ({status})"))
        }
    };
    Err(RegistryError::new(kind, format!("{shown}: {why}")))
}

/// Receives a whole answer of at most so many bytes.
pub async fn whole(shown: &str, mut answer: Response, most_bytes: usize) -> Result<Vec<u8>, RegistryError> {
    let mut bytes = Vec::new();
    loop {
        let part = answer.chunk().await.map_err(|e| {
            let message =
                format!("{shown}: the answer ended early: {}: try again", root_cause(&e.without_url()));
            RegistryError::new(RegistryErrorKind::Unreachable, message)
        })?;
        let Some(part) = part else { return Ok(bytes) };
        if bytes.len() + part.len() > most_bytes {
            return Err(super::damaged(format!("{shown}: the answer has more than {most_bytes} bytes")));
        }
        bytes.extend_from_slice(&part);
    }
}
