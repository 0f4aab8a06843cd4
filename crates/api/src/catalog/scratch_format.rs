//! File system that scratch disks are made with. Owns the syntax and the bounds of labels.
//!
//! Invariant: a label is plain: it is a word of a command line, of a file's name and of a guest's scripts as it stands.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

const WORDS: &str =
    "scratch_format is ntfs:LABEL or ext4:LABEL, such as 'ntfs:Temporary Storage' or ext4:scratch";

/// File system of scratch disks, with its label: `ntfs:Temporary Storage`, `ext4:scratch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ScratchFormat {
    system: FileSystem,
    label: String,
}

/// Kind of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// NTFS, for Windows.
    Ntfs,
    /// ext4, for Linux.
    Ext4,
}

impl FileSystem {
    /// Word of the kind in settings.
    pub fn word(self) -> &'static str {
        match self {
            FileSystem::Ntfs => "ntfs",
            FileSystem::Ext4 => "ext4",
        }
    }

    /// Longest label, in bytes.
    pub fn most_label_bytes(self) -> usize {
        match self {
            FileSystem::Ntfs => 32,
            FileSystem::Ext4 => 16,
        }
    }

    /// Smallest disk, in bytes. The file system is in a partition, and keeps a journal.
    pub fn least_disk_bytes(self) -> u64 {
        match self {
            FileSystem::Ntfs => 64 << 20,
            FileSystem::Ext4 => 16 << 20,
        }
    }
}

impl ScratchFormat {
    /// Kind of the file system.
    pub fn system(&self) -> FileSystem {
        self.system
    }

    /// Label of the file system.
    pub fn label(&self) -> &str {
        &self.label
    }
}

impl FromStr for ScratchFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<ScratchFormat, String> {
        let (word, label) = text.split_once(':').ok_or(WORDS)?;
        let mut all = [FileSystem::Ntfs, FileSystem::Ext4].into_iter();
        let system = all.find(|system| system.word() == word).ok_or(WORDS)?;
        let most = system.most_label_bytes();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || " -_".contains(c);
        if label.is_empty() || label.len() > most || !label.chars().all(is_plain) || label.trim() != label {
            return Err(format!(
                "a label of {word} has 1 to {most} letters, digits, spaces, - and _, with no space at either end"
            ));
        }
        Ok(ScratchFormat { system, label: label.into() })
    }
}

impl TryFrom<String> for ScratchFormat {
    type Error = String;

    fn try_from(text: String) -> Result<ScratchFormat, String> {
        text.parse()
    }
}

impl From<ScratchFormat> for String {
    fn from(format: ScratchFormat) -> String {
        format.to_string()
    }
}

impl fmt::Display for ScratchFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.system.word(), self.label)
    }
}

impl PartialSchema for ScratchFormat {
    fn schema() -> RefOr<Schema> {
        let pattern = "^(ntfs:[A-Za-z0-9_-]([A-Za-z0-9 _-]{0,30}[A-Za-z0-9_-])?|ext4:[A-Za-z0-9_-]([A-Za-z0-9 _-]{0,14}[A-Za-z0-9_-])?)$";
        ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).into()
    }
}

impl ToSchema for ScratchFormat {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_a_word_and_a_plain_label() {
        let longest = ["ntfs:", &"n".repeat(32)].concat();
        for text in ["ntfs:Temporary Storage", "ext4:scratch", "ext4:a-b_c 1", longest.as_str()] {
            let format: ScratchFormat = serde_json::from_value(text.into()).unwrap();
            assert_eq!(serde_json::to_value(&format).unwrap(), text);
        }
        for (text, why) in [
            ("", "ntfs:LABEL or ext4:LABEL"),
            ("ntfs", "ntfs:LABEL or ext4:LABEL"),
            ("NTFS:x", "ntfs:LABEL or ext4:LABEL"),
            ("vfat:x", "ntfs:LABEL or ext4:LABEL"),
            ("ntfs:", "1 to 32 letters"),
            ("ntfs: x", "no space at either end"),
            ("ntfs:a/b", "1 to 32 letters"),
            ("ntfs:../x", "1 to 32 letters"),
            ("ext4:a:b", "1 to 16 letters"),
            ("ext4:\u{e9}", "1 to 16 letters"),
            ("ext4:a\nb", "1 to 16 letters"),
            ("ext4:12345678901234567", "1 to 16 letters"),
        ] {
            let error = text.parse::<ScratchFormat>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!([longest.as_str(), "n"].concat().parse::<ScratchFormat>().is_err());
    }
}
