//! Downloads an image from a web server or from an OCI registry into a file of the daemon's.
//!
//! Invariant: nothing is connected to that no rule of the order allows; no length and no name that a server or an archive gives is
//! trusted; what has a digest is compared with it before the download is reported as done.

mod body;
mod layer;
mod oci;
mod output;
mod packing;
mod web;

use body::Body;
use output::Output;
use packing::{Packing, plain};
use reqwest::Url;
use spillway_registry::download::{DownloadOrder, UrlKind};
use spillway_registry::job::JobMessage;
use spillway_registry::{RegistryError, RegistryErrorKind};
use std::fmt::Display;
use std::fs::File;
use std::io;
use web::WebClient;

/// Ends of addresses of files in which an image is packed, and which are not unpacked here.
const PACKED: [&str; 11] =
    [".xz", ".bz2", ".lzma", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".ova", ".tar.gz", ".tar.zst"];

fn unsupported(why: impl Display) -> RegistryError {
    RegistryError::new(RegistryErrorKind::Unsupported, why)
}

fn damaged(why: impl Display) -> RegistryError {
    RegistryError::new(RegistryErrorKind::Damaged, why)
}

/// Carries out a download.
pub async fn download(order: DownloadOrder) -> Result<JobMessage, RegistryError> {
    let url = order.url.to_string();
    let file = File::options().write(true).open(&order.to);
    let file = file.map_err(|e| super::job::local(format!("{url}: the download cannot be written: {e}")))?;
    let output = Output::new(file, order.most_bytes);
    let client = WebClient::new(order.rules.clone());
    let url = match order.url.kind() {
        UrlKind::Oci => oci::download(&client, &order, output).await?,
        UrlKind::Https | UrlKind::Http => {
            web_file(client, &order, output).await?;
            url
        }
    };
    Ok(JobMessage::Downloaded { url })
}

/// How the file at an address is packed, by the end of its name: its content has no say.
fn packing_of(shown: &str) -> Result<Packing, RegistryError> {
    let name = shown.to_ascii_lowercase();
    if let Some(end) = PACKED.iter().find(|end| name.ends_with(**end)) {
        return Err(unsupported(format!(
            "{shown}: files that end in {end} are not unpacked: download it, unpack it, and import the file"
        )));
    }
    Ok(match name.rsplit('.').next() {
        Some("gz") => Packing::Gzip,
        Some("zst") => Packing::Zstd,
        _ => Packing::None,
    })
}

/// Downloads a file of a web server.
async fn web_file(client: WebClient, order: &DownloadOrder, mut output: Output) -> Result<(), RegistryError> {
    let shown = order.url.to_string();
    let packing = packing_of(&shown)?;
    let url = Url::parse(order.url.secret_text())
        .map_err(|e| unsupported(format!("{shown}: it is no address: {e}")))?;
    let answer = client.get(&shown, url, &[]).await?;
    web::check_status(&shown, answer.status())?;
    let mut body = Body::new(answer, &shown, order.most_bytes)?;
    let sha256 = order.sha256.clone();
    let unpack = move || {
        body.say_total();
        let faults = body.faults();
        let copied = io::copy(&mut plain(&mut body, packing), &mut output);
        let done = copied.and_then(|_| output.finish());
        done.map_err(|e| faults.explain(&shown, &e))?;
        if output.is_empty() {
            return Err(damaged(format!("{shown}: the file is empty: correct the address")));
        }
        let found = body.finish().map_err(|e| faults.explain(&shown, &e))?;
        match sha256 {
            Some(expected) if expected != found => Err(damaged(format!(
                "{shown}: the file has the SHA-256 {found}, and not {expected}: it was changed, or the digest is of another file"
            ))),
            _ => Ok(()),
        }
    };
    tokio::task::spawn_blocking(unpack).await.map_err(super::job::local)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_how_a_file_is_packed() {
        for (name, expected) in [
            ("https://h/a.qcow2", Packing::None),
            ("https://h/a.RAW.GZ", Packing::Gzip),
            ("https://h/a.img.zst", Packing::Zstd),
            ("https://h/gz", Packing::None),
        ] {
            assert_eq!(packing_of(name).unwrap(), expected, "{name}");
        }
        for name in ["https://h/a.qcow2.xz", "https://h/a.tar.gz", "https://h/a.ova"] {
            assert!(packing_of(name).unwrap_err().message.contains("unpack it"), "{name}");
        }
    }
}
