//! Downloads of images from web servers and OCI registries. Owns the rules of the administrator about where from, and what is
//! checked of a request before anything is looked up.
//!
//! Invariant: without a rule for its host nothing is downloaded, and no part of an address that may be secret is in an error.

use super::job::{Job, JobFiles};
use super::{LONG, strange};
use crate::error::HostError;
use crate::operations::Progress;
use spillway_api::{ErrorCode, ImageDownload};
use spillway_image::MAX_DISK_BYTES;
pub use spillway_registry::download::SourceRule;
use spillway_registry::download::{
    DownloadOrder, ImageUrl, UrlKind, is_plain_registry, is_sha256, reach, rule_for, usual_port,
};
use spillway_registry::job::{JobMessage, JobOrder};
use std::path::{Path, PathBuf};

/// What images may be downloaded from. A clone is the same.
#[derive(Clone)]
pub struct Downloads {
    program: PathBuf,
    rules: Vec<SourceRule>,
}

/// A download that was checked.
pub struct CheckedDownload {
    url: ImageUrl,
    sha256: Option<String>,
}

impl CheckedDownload {
    /// The address, for people and records.
    pub fn shown(&self) -> String {
        self.url.to_string()
    }
}

impl Downloads {
    /// Downloads that these rules allow. `program` is `spillway-streamd`.
    pub fn new(program: PathBuf, rules: Vec<SourceRule>) -> Downloads {
        Downloads { program, rules }
    }

    /// Refuses a request that is none, or that no rule allows.
    pub fn check(&self, download: &ImageDownload) -> Result<CheckedDownload, HostError> {
        let invalid = |why: String| HostError::invalid(format!("the address of the image: {why}"));
        let url: ImageUrl = download.url.parse().map_err(invalid)?;
        let sha256 = download.sha256.as_ref().map(|digest| digest.to_ascii_lowercase());
        if let Some(digest) = &sha256 {
            if url.kind() == UrlKind::Oci {
                let message = format!(
                    "{url}: an image of a registry is named by its digest: oci://REGISTRY/REPOSITORY@sha256:HEX"
                );
                return Err(HostError::invalid(message));
            }
            if !is_sha256(digest) {
                let message = format!("{url}: a SHA-256 has 64 hexadecimal digits, as sha256sum prints them");
                return Err(HostError::invalid(message));
            }
        }
        let is_plain = match url.kind() {
            UrlKind::Https => false,
            UrlKind::Http => true,
            UrlKind::Oci => is_plain_registry(&self.rules, url.host(), url.port()),
        };
        let port = url.port().unwrap_or_else(|| usual_port(is_plain));
        if reach(&self.rules, is_plain, url.host(), port).is_none() {
            let rule = rule_for(is_plain, url.host(), port, false);
            let message = format!(
                "{url}: this host does not download from there: if it should, start spillwayd with --import-from {rule} \
                 (/etc/default/spillwayd)"
            );
            return Err(HostError::new(ErrorCode::Forbidden, message));
        }
        Ok(CheckedDownload { url, sha256 })
    }

    /// Downloads to an existing file. Returns the address for records; of an OCI registry with the digest of the image.
    pub fn run(
        &self,
        download: &CheckedDownload,
        to: &Path,
        progress: &Progress,
    ) -> Result<String, HostError> {
        let CheckedDownload { url, sha256 } = download;
        let order = JobOrder::Download(DownloadOrder {
            url: url.clone(),
            to: to.to_owned(),
            sha256: sha256.clone(),
            rules: self.rules.clone(),
            most_bytes: MAX_DISK_BYTES,
        });
        let job = Job { program: &self.program, subject: url.to_string(), deadline: LONG };
        let files = JobFiles { reads: vec![], writes: to.parent().map(Path::to_owned) };
        match job.run(&order, files, None, progress)? {
            JobMessage::Downloaded { url } => Ok(url),
            other => Err(strange(&other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_api::SourceFormat;

    #[test]
    fn a_request_is_checked_before_anything_is_looked_up() {
        let check = |rules: &[&str], url: &str, sha256: Option<&str>| {
            let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
            let download = ImageDownload {
                url: url.into(),
                format: SourceFormat::Raw,
                sha256: sha256.map(str::to_owned),
                store: None,
            };
            Downloads::new("/nonexistent".into(), rules).check(&download).map(|checked| checked.shown())
        };
        let hex = "AB".repeat(32);
        let url = "https://example.org/x?signature=secret";
        assert_eq!(check(&["example.org"], url, Some(&hex)).unwrap(), "https://example.org/x");
        assert_eq!(check(&["*"], "oci://quay.io/a/b", None).unwrap(), "oci://quay.io/a/b");
        let refused = |rules: &[&str], url: &str, sha256, code, word: &str| {
            let error = check(rules, url, sha256).unwrap_err();
            let is_told = error.message.contains(word) && !error.message.contains("secret");
            assert!(error.code == code && is_told, "{url}: {error:?}");
        };
        use ErrorCode::{Forbidden, Invalid};
        refused(&[], url, None, Forbidden, "--import-from example.org ");
        refused(&["*"], "http://example.org/x", None, Forbidden, "--import-from http://example.org ");
        refused(&["example.org"], "https://example.org:8443/x", None, Forbidden, "example.org:8443 ");
        refused(&["example.org"], "https://me:secret@example.org/x", None, Invalid, "no user and password");
        refused(&["*"], "oci://quay.io/a", Some(&hex), Invalid, "@sha256:HEX");
        refused(&["*"], "https://quay.io/a", Some("12"), Invalid, "64 hexadecimal digits");
    }
}
