//! Signatures of images, made by minisign. Owns what is signed: the bytes of the manifest, and, as trusted comment, the
//! name, the version and the image's digest. A signature is of use for that name and version only: nobody can give an old
//! image the name of a new one.

use crate::error::{RegistryError, RegistryErrorKind};
use spillway_image::digests::{ChunkDigest, named};

/// Largest signature that is read, in bytes.
pub const MOST_SIGNATURE_BYTES: u64 = 4096;

/// The trusted comment that a signature must have.
pub fn trusted_comment(name: &str, version: u32, root: &ChunkDigest) -> String {
    format!("spillway {name}:{version} {}", named(root))
}

/// A public key of minisign.
#[derive(Clone, Debug)]
pub struct PublicKey {
    key: minisign_verify::PublicKey,
    text: String,
}

impl PublicKey {
    /// Reads a key: the line that `minisign -G` prints, or the file that it writes.
    ///
    /// # Errors
    /// The text is no key of minisign.
    pub fn parse(text: &str) -> Result<PublicKey, String> {
        let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
        let key = minisign_verify::PublicKey::from_base64(line)
            .map_err(|_| "it is no public key of minisign, which begins with RW".to_owned())?;
        Ok(PublicKey { key, text: line.to_owned() })
    }

    /// The line.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether a signature is this key's, of these bytes and this comment.
    fn has_signed(&self, signature: &minisign_verify::Signature, bytes: &[u8]) -> bool {
        // `false`: only signatures of the hash, which all versions of minisign since 0.10 make.
        self.key.verify(bytes, signature, false).is_ok()
    }
}

/// Refuses a signature that none of the keys has made for this name, version and image.
pub(crate) fn verify(
    keys: &[PublicKey],
    signature: Option<&str>,
    manifest: &[u8],
    (name, version, root): (&str, u32, &ChunkDigest),
) -> Result<(), RegistryError> {
    if keys.is_empty() {
        return Ok(());
    }
    let refuse = |why: &str| {
        let message = format!(
            "{name}:{version} is refused: {why}. This registry requires a signature: push the version with --sign KEY"
        );
        RegistryError::new(RegistryErrorKind::Unsigned, message)
    };
    let text = signature.ok_or_else(|| refuse("it has no signature"))?;
    let signature = minisign_verify::Signature::decode(text)
        .map_err(|_| refuse("its signature is none of minisign's"))?;
    if !keys.iter().any(|key| key.has_signed(&signature, manifest)) {
        return Err(refuse("its signature is not one of a required key"));
    }
    if signature.trusted_comment() != trusted_comment(name, version, root) {
        return Err(refuse("its signature is of another name, version or image"));
    }
    Ok(())
}
