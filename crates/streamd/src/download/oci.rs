//! Images and artifacts of OCI registries (distribution specification 1.1): which blob has the disk, and the token that a registry
//! wants. Owns the parsing of manifests; knows no other part of an image.
//!
//! Invariant: each manifest that is named by a digest, and each blob, is compared with it; an address in a manifest is never used.

use super::body::Body;
use super::layer::find_disk;
use super::output::Output;
use super::web::{WebClient, check_status, whole};
use super::{damaged, unsupported};
use reqwest::header::{ACCEPT, AUTHORIZATION, WWW_AUTHENTICATE};
use reqwest::{Response, Url};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use spillway_image::digests::hex;
use spillway_registry::download::{DownloadOrder, OciReference, is_digest, is_plain_registry};
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::io;
use std::sync::Mutex;

/// Kinds of manifests that are asked for: images and indexes, of OCI and of Docker.
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
                         application/vnd.docker.distribution.manifest.list.v2+json, \
                         application/vnd.docker.distribution.manifest.v2+json";
/// Kinds of configurations of images, whose layers are archives. All others are of artifacts, whose layers are files.
const OF_IMAGES: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];
/// Largest manifest; what registries accept too.
const MOST_MANIFEST_BYTES: usize = 4 << 20;
const MOST_TOKEN_BYTES: usize = 64 << 10;
const MOST_LAYERS: usize = 200;
/// Longest list of platforms in a message.
const MOST_PLATFORMS: usize = 10;

/// A manifest of an image or an artifact, or an index of manifests: what is used of them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u32,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// Answer of a server of tokens.
#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// A repository of a registry.
struct Repository<'a> {
    client: &'a WebClient,
    /// Address of the registry.
    base: Url,
    name: String,
    /// The image for errors.
    shown: String,
    /// The header with the token that the registry wants.
    token: Mutex<Option<String>>,
}

/// Downloads the disk of an image. Returns the address with the digest of its manifest.
pub async fn download(
    client: &WebClient,
    order: &DownloadOrder,
    mut output: Output,
) -> Result<String, RegistryError> {
    let shown = order.url.to_string();
    let reference = order.url.reference().map_err(|why| unsupported(format!("{shown}: {why}")))?;
    let is_plain = is_plain_registry(client.rules(), order.url.host(), order.url.port());
    let port = order.url.port().map_or_else(String::new, |port| format!(":{port}"));
    let base = format!("{}://{}{port}/", if is_plain { "http" } else { "https" }, order.url.host());
    let base = Url::parse(&base).map_err(|e| unsupported(format!("{shown}: it is no address: {e}")))?;
    let name = reference.repository.clone();
    let repository = Repository { client, base, name, shown: shown.clone(), token: Mutex::default() };
    let (manifest, digest) = repository.image(&reference).await?;
    let layers = manifest.layers.unwrap_or_default();
    if layers.len() > MOST_LAYERS {
        return Err(unsupported(format!("{shown}: it has more than {MOST_LAYERS} layers")));
    }
    let is_image = manifest.config.is_some_and(|config| OF_IMAGES.contains(&config.media_type.as_str()));
    match (is_image, layers.as_slice()) {
        (true, layers) => {
            // What a later layer has hides what an earlier one has.
            for layer in layers.iter().rev() {
                let found;
                (found, output) = repository.layer(layer, order.most_bytes, output, true).await?;
                if found {
                    return Ok(with_digest(&shown, &digest));
                }
            }
            Err(unsupported(format!("{shown}: it has no disk: none of its layers has a file below disk/")))
        }
        (false, [file]) => {
            repository.layer(file, order.most_bytes, output, false).await?;
            Ok(with_digest(&shown, &digest))
        }
        (false, files) => Err(unsupported(format!(
            "{shown}: it is an artifact of {} files: one that has a disk has one",
            files.len()
        ))),
    }
}

fn with_digest(shown: &str, digest: &str) -> String {
    if shown.contains('@') { shown.to_owned() } else { format!("{shown}@{digest}") }
}

impl Repository<'_> {
    /// The manifest of the image, for this platform if there are several, and the digest of what the reference names.
    async fn image(&self, reference: &OciReference) -> Result<(Manifest, String), RegistryError> {
        let named = reference.digest.as_deref().unwrap_or(&reference.tag);
        let (manifest, digest) = self.manifest(named, reference.digest.as_deref()).await?;
        let Some(manifests) = &manifest.manifests else { return Ok((manifest, digest)) };
        let is_ours = |descriptor: &&Descriptor| {
            descriptor.platform.as_ref().is_some_and(|of| of.os == "linux" && of.architecture == "amd64")
        };
        let one = match manifests.as_slice() {
            [only] if only.platform.is_none() => only,
            all => all.iter().find(is_ours).ok_or_else(|| {
                let platforms = all.iter().filter_map(|descriptor| descriptor.platform.as_ref());
                let names = platforms.map(|of| printable(&format!("{}/{}", of.os, of.architecture)));
                let names: Vec<_> = names.take(MOST_PLATFORMS).collect();
                unsupported(format!(
                    "{}: it has no image for linux/amd64, but for: {}",
                    self.shown,
                    names.join(", ")
                ))
            })?,
        };
        let (chosen, _) = self.manifest(&one.digest, Some(&one.digest)).await?;
        if chosen.manifests.is_some() {
            return Err(unsupported(format!("{}: its index names another index", self.shown)));
        }
        Ok((chosen, digest))
    }

    /// A manifest, which has this digest if one is known, and its digest.
    async fn manifest(
        &self,
        named: &str,
        expected: Option<&str>,
    ) -> Result<(Manifest, String), RegistryError> {
        if let Some(digest) = expected {
            self.check_digest(digest)?;
        }
        let answer = self.get(&format!("manifests/{named}"), Some(MANIFESTS)).await?;
        let said = answer.headers().get("docker-content-digest").and_then(|said| said.to_str().ok());
        let said = said.filter(|said| is_digest(said)).map(str::to_owned);
        let bytes = whole(&self.shown, answer, MOST_MANIFEST_BYTES).await?;
        let digest = format!("sha256:{}", hex(&Sha256::digest(&bytes)));
        if let Some(other) = expected.map(str::to_owned).or(said).filter(|expected| *expected != digest) {
            return Err(damaged(format!(
                "{}: its manifest has the digest {digest}, and not {other}",
                self.shown
            )));
        }
        let manifest: Manifest = serde_json::from_slice(&bytes)
            .map_err(|e| unsupported(format!("{}: its manifest is not understood: {e}", self.shown)))?;
        if manifest.schema_version != 2 || manifest.manifests.is_some() == manifest.layers.is_some() {
            return Err(unsupported(format!("{}: its manifest is of no form that is read here", self.shown)));
        }
        Ok((manifest, digest))
    }

    /// Refuses what is no digest, or not one of SHA-256.
    fn check_digest(&self, digest: &str) -> Result<(), RegistryError> {
        if is_digest(digest) {
            return Ok(());
        }
        Err(unsupported(format!("{}: '{}' is no digest of SHA-256", self.shown, printable(digest))))
    }

    /// Brings a layer: the disk in an archive, if there is one, or the layer itself. Returns whether the output has the disk.
    async fn layer(
        &self,
        layer: &Descriptor,
        most_bytes: u64,
        mut output: Output,
        is_archive: bool,
    ) -> Result<(bool, Output), RegistryError> {
        self.check_digest(&layer.digest)?;
        if layer.size > most_bytes {
            return Err(unsupported(format!(
                "{}: a layer has {} bytes, more than an image may have",
                self.shown, layer.size
            )));
        }
        let answer = self.get(&format!("blobs/{}", layer.digest), None).await?;
        let mut body = Body::new(answer, &self.shown, layer.size)?;
        let (shown, digest) = (self.shown.clone(), layer.digest.clone());
        let unpack = move || {
            body.say_total();
            let faults = body.faults();
            let explain = |e: io::Error| faults.explain(&shown, &e);
            let found = match is_archive {
                // Beside the disk there is little in a layer.
                true => find_disk(&mut body, &mut output, most_bytes.saturating_mul(2)),
                false => io::copy(&mut body, &mut output).map(|_| true),
            };
            let found =
                found.and_then(|found| if found { output.finish().map(|()| true) } else { Ok(false) });
            // Damage explains what an archive cannot be read for.
            let actual = body.finish().map_err(explain)?;
            if digest != format!("sha256:{actual}") {
                return Err(damaged(format!(
                    "{shown}: a layer has the digest sha256:{actual}, and not {digest}"
                )));
            }
            let found = found.map_err(explain)?;
            if found && output.is_empty() {
                return Err(damaged(format!("{shown}: its disk is empty")));
            }
            Ok((found, output))
        };
        tokio::task::spawn_blocking(unpack).await.map_err(crate::job::local)?
    }

    /// Gets an object of the repository, with a token if the registry wants one.
    async fn get(&self, object: &str, accept: Option<&str>) -> Result<Response, RegistryError> {
        let url = self.base.join(&format!("v2/{}/{object}", self.name));
        let url = url.map_err(|e| unsupported(format!("{}: it is no address: {e}", self.shown)))?;
        let mut answer = self.ask(&url, accept).await?;
        if answer.status().as_u16() == 401 {
            let challenges =
                answer.headers().get_all(WWW_AUTHENTICATE).iter().filter_map(|text| text.to_str().ok());
            let bearer = challenges.filter_map(Challenge::parse).next();
            if let Some(challenge) = bearer {
                let token = self.token(&challenge).await?;
                *self.token.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
                    Some(format!("Bearer {token}"));
                answer = self.ask(&url, accept).await?;
            }
        }
        match answer.status().as_u16() {
            404 => {
                let why = "the registry has no such image, or not all of it: correct the name and the tag";
                Err(RegistryError::new(RegistryErrorKind::Absent, format!("{}: {why}", self.shown)))
            }
            401 | 403 => {
                let why = "the registry does not give it to everybody, and credentials for registries are not supported: copy it with \
                           another program, and import the file";
                Err(RegistryError::new(RegistryErrorKind::Denied, format!("{}: {why}", self.shown)))
            }
            _ => check_status(&self.shown, answer.status()).map(|()| answer),
        }
    }

    async fn ask(&self, url: &Url, accept: Option<&str>) -> Result<Response, RegistryError> {
        let token = self.token.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let headers = [(ACCEPT, accept), (AUTHORIZATION, token.as_deref())];
        let headers: Vec<_> =
            headers.iter().filter_map(|(name, value)| Some((name.as_str(), (*value)?))).collect();
        self.client.get(&self.shown, url.clone(), &headers).await
    }

    /// Gets a token for everybody.
    async fn token(&self, challenge: &Challenge) -> Result<String, RegistryError> {
        let shown = format!("{}: a token for it", self.shown);
        let mut url = self
            .base
            .join(&challenge.realm)
            .map_err(|e| unsupported(format!("{shown}: the registry names no address for it: {e}")))?;
        let values = [("service", &challenge.service), ("scope", &challenge.scope)];
        for (key, value) in values.iter().filter_map(|(key, value)| Some((key, value.as_ref()?))) {
            url.query_pairs_mut().append_pair(key, value);
        }
        if url.scheme() == "http" && self.base.scheme() == "https" {
            let message = format!("{shown}: the registry names a server without TLS: tell its owner");
            return Err(RegistryError::new(RegistryErrorKind::Forbidden, message));
        }
        let answer = self.client.get(&shown, url, &[]).await?;
        check_status(&shown, answer.status())?;
        let bytes = whole(&shown, answer, MOST_TOKEN_BYTES).await?;
        let token: Option<Token> = serde_json::from_slice(&bytes).ok();
        let token = token.and_then(|token| token.token.or(token.access_token));
        let is_plain =
            |token: &String| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        token.filter(is_plain).ok_or_else(|| unsupported(format!("{shown}: the server answers none")))
    }
}

/// What a registry wants (RFC 6750): a token of this server.
#[derive(Debug, Default, PartialEq, Eq)]
struct Challenge {
    realm: String,
    service: Option<String>,
    scope: Option<String>,
}

impl Challenge {
    /// Parses `Bearer realm="...",service="...",scope="..."`.
    fn parse(text: &str) -> Option<Challenge> {
        let (scheme, mut rest) = text.trim_start().split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut found = Challenge::default();
        while let Some((key, after)) = rest.split_once('=') {
            let value;
            (value, rest) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(',').unwrap_or((after, "")),
            };
            match key.trim_matches([' ', ',']).to_ascii_lowercase().as_str() {
                "realm" => found.realm = value.to_owned(),
                "service" => found.service = Some(value.to_owned()),
                "scope" => found.scope = Some(value.to_owned()),
                _ => {}
            }
        }
        (!found.realm.is_empty()).then_some(found)
    }
}

/// Words of a registry, for a message.
fn printable(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_names_a_server_of_tokens() {
        let text = "Bearer realm=\"https://auth.example/token?a=b\",service=\"registry\",scope=\"repository:a/b:pull,push\"";
        let expected = Challenge {
            realm: "https://auth.example/token?a=b".into(),
            service: Some("registry".into()),
            scope: Some("repository:a/b:pull,push".into()),
        };
        assert_eq!(Challenge::parse(text), Some(expected));
        let short = Challenge { realm: "/token".into(), ..Challenge::default() };
        assert_eq!(Challenge::parse("bearer error=invalid , realm=/token"), Some(short));
        for text in
            ["", "Basic realm=\"x\"", "Bearer", "Bearer scope=\"x\"", "Bearer realm=\"x", "Bearer realm"]
        {
            assert_eq!(Challenge::parse(text), None, "{text}");
        }
    }
}
