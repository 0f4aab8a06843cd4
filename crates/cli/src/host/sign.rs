//! Signs an image version with minisign, whose program alone sees the key and asks for its password.

use crate::error::{Exit, Failure};
use spillway_api::ImageManifest;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns the signature of a manifest by this secret key.
pub fn sign(manifest: &ImageManifest, key: &Path) -> Result<String, Failure> {
    let failed = |e: io::Error| Failure::new(Exit::Create, format!("a folder for the signature: {e}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let [content, signature] = ["image.json", "signature"].map(|name| folder.path().join(name));
    std::fs::write(&content, &manifest.manifest).map_err(failed)?;
    let mut minisign = Command::new("minisign");
    minisign.arg("-S").arg("-s").arg(key).arg("-m").arg(&content).arg("-x").arg(&signature);
    minisign.arg("-t").arg(&manifest.trusted_comment);
    // It asks for the password, on the terminal.
    minisign.stdout(Stdio::from(io::stderr()));
    let ended = minisign.status().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Failure::new(
            Exit::Unavailable,
            "minisign, which makes signatures, is not installed (Debian: minisign)",
        ),
        _ => Failure::new(Exit::Unavailable, format!("minisign cannot be started: {e}")),
    })?;
    if !ended.success() {
        return Err(Failure::usage(format!(
            "minisign has not signed with {}: nothing was pushed",
            key.display()
        )));
    }
    std::fs::read_to_string(&signature).map_err(failed)
}
