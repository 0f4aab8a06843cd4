//! The specification of a disk. Pure data; checked once, by [`DiskSpec::check`].

use crate::units::{BLOCK_BYTES, MAX_DISK_BYTES, SECTOR_BYTES, bytes_in_words};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Where a disk's writes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Mode {
    /// To the RAM tier, then to the overflow. The default.
    #[serde(rename = "ram+overflow")]
    RamOverflow = 0,
    /// To the RAM tier alone.
    Ram = 1,
    /// Straight to the overflow log, and acknowledged when written there.
    Overflow = 2,
    /// In place in a difference file; FLUSH is honoured.
    Direct = 3,
    /// In place in a file that has a name and outlives all processes, and up to the last FLUSH a loss of power.
    Persistent = 4,
    /// In place in a full private copy of the image, which is deleted when its last process closes it; FLUSH is honoured.
    Ephemeral = 5,
}

impl Mode {
    /// All modes, in the order of the documentation.
    pub const ALL: [Mode; 6] =
        [Mode::RamOverflow, Mode::Ram, Mode::Overflow, Mode::Direct, Mode::Persistent, Mode::Ephemeral];

    /// Has a RAM tier.
    #[inline]
    pub fn has_ram(self) -> bool {
        matches!(self, Mode::RamOverflow | Mode::Ram)
    }

    /// Has an overflow log.
    #[inline]
    pub fn has_log(self) -> bool {
        matches!(self, Mode::RamOverflow | Mode::Overflow)
    }

    /// Has a file of any kind that is written.
    #[inline]
    pub fn has_file(self) -> bool {
        self != Mode::Ram
    }

    /// Each block has its place in the file: there is no write cache that could be full, and FLUSH is honoured.
    #[inline]
    pub fn writes_in_place(self) -> bool {
        matches!(self, Mode::Direct | Mode::Persistent | Mode::Ephemeral)
    }

    /// Whether the file has a name, which is given when the disk is started. If not, it has none and is made in the overflow
    /// directory.
    #[inline]
    pub fn has_named_file(self) -> bool {
        matches!(self, Mode::Persistent | Mode::Ephemeral)
    }

    /// Its name in the CLI and in documents.
    pub fn name(self) -> &'static str {
        match self {
            Mode::RamOverflow => "ram+overflow",
            Mode::Ram => "ram",
            Mode::Overflow => "overflow",
            Mode::Direct => "direct",
            Mode::Persistent => "persistent",
            Mode::Ephemeral => "ephemeral",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Mode::ALL.into_iter().find(|m| m.name() == s).ok_or_else(|| {
            format!("unknown mode '{s}': use ram+overflow, ram, overflow, direct, persistent or ephemeral")
        })
    }
}

/// What happens to a write when the cache is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum FullPolicy {
    /// The write waits until there is space; the guest sees a slow disk.
    Pause = 0,
    /// The write fails with ENOSPC; the guest sees an error.
    Fail = 1,
}

impl FullPolicy {
    /// All policies, the usual one first.
    pub const ALL: [FullPolicy; 2] = [FullPolicy::Pause, FullPolicy::Fail];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            FullPolicy::Pause => "pause",
            FullPolicy::Fail => "fail",
        }
    }
}

impl FromStr for FullPolicy {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "pause" => Ok(FullPolicy::Pause),
            "fail" => Ok(FullPolicy::Fail),
            _ => Err(format!("unknown policy '{s}': use pause or fail")),
        }
    }
}

/// Shape of the overflow log. The default is the product's; tests use small ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogShape {
    /// Blocks in a segment, its summary block included.
    pub segment_blocks: u32,
    /// Most blocks in one write.
    pub part_blocks: u32,
}

impl Default for LogShape {
    fn default() -> Self {
        LogShape { segment_blocks: 256, part_blocks: 48 }
    }
}

/// The specification of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// Size that the guest sees: a multiple of 512, at most 4 TiB.
    pub size_bytes: u64,
    /// Size of the base image: a multiple of 512, at most `size_bytes`. The rest reads as zeroes.
    pub base_bytes: u64,
    /// Where writes go.
    pub mode: Mode,
    /// What happens when there is no space.
    pub full: FullPolicy,
    /// Limit of the RAM tier (modes with one; else 0).
    pub ram_limit_bytes: u64,
    /// Limit of the overflow file (modes with a log; else 0).
    pub overflow_limit_bytes: u64,
    /// Shape of the overflow log.
    pub shape: LogShape,
}

/// Segments that the log needs at least: the collector's reserve, two open ones, and some to fill.
pub const MIN_SEGMENTS: u64 = 16;
/// Segments that the log has at most: 4 TiB of the default shape.
const MAX_SEGMENTS: u64 = 1 << 22;
/// Blocks that a segment has at most: its summary names their owners in one block.
const MAX_SEGMENT_BLOCKS: u32 = 1 + (BLOCK_BYTES as u32 - 16) / 4;
/// Blocks that a part has at most: a staging buffer has 256 KiB.
const MAX_PART_BLOCKS: u32 = 64;

impl DiskSpec {
    /// Bytes in a segment.
    #[inline]
    pub fn segment_bytes(&self) -> u64 {
        u64::from(self.shape.segment_blocks) * BLOCK_BYTES as u64
    }

    /// Slots of the RAM tier.
    #[inline]
    pub fn slots(&self) -> u32 {
        if self.mode.has_ram() { (self.ram_limit_bytes / BLOCK_BYTES as u64) as u32 } else { 0 }
    }

    /// Segments of the overflow log.
    #[inline]
    pub fn segments(&self) -> u32 {
        if self.mode.has_log() { (self.overflow_limit_bytes / self.segment_bytes()) as u32 } else { 0 }
    }

    /// Segments that the log may ever have, whatever its limit is now.
    #[inline]
    pub fn most_segments(&self) -> u32 {
        if self.mode.has_log() { MAX_SEGMENTS.min(MAX_DISK_BYTES / self.segment_bytes()) as u32 } else { 0 }
    }

    /// Length that the overflow (difference) file must have: what the disk uses of it, and at the end one block
    /// that it never does, for the core's `Io::drain_overflow`. 0 in modes without a file.
    #[inline]
    pub fn file_bytes(&self) -> u64 {
        let used = match self.mode {
            Mode::Ram => return 0,
            Mode::RamOverflow | Mode::Overflow => self.overflow_limit_bytes,
            Mode::Direct | Mode::Persistent | Mode::Ephemeral => {
                u64::from(self.blocks()) * BLOCK_BYTES as u64
            }
        };
        used + BLOCK_BYTES as u64
    }

    /// Blocks of the disk; the last may be partial.
    #[inline]
    pub fn blocks(&self) -> u32 {
        self.size_bytes.div_ceil(BLOCK_BYTES as u64) as u32
    }

    /// Refuses an invalid specification.
    pub fn check(&self) -> Result<(), String> {
        let spec = |s: String| Err(s);
        if self.size_bytes == 0 || !self.size_bytes.is_multiple_of(SECTOR_BYTES) {
            return spec(format!("disk size {} is not a positive multiple of 512 bytes", self.size_bytes));
        }
        if self.size_bytes > MAX_DISK_BYTES {
            return spec(format!("disk size {} is more than 4 TiB, the largest disk", self.size_bytes));
        }
        if !self.base_bytes.is_multiple_of(SECTOR_BYTES) {
            return spec(format!("base image size {} is not a multiple of 512 bytes", self.base_bytes));
        }
        if self.base_bytes > self.size_bytes {
            return spec(format!(
                "disk size {} is smaller than the base image's {}: leave --size out or make it larger",
                self.size_bytes, self.base_bytes
            ));
        }
        if self.mode == Mode::Ephemeral && self.base_bytes != 0 {
            return spec("mode ephemeral has no base image: its file is a full copy of one".into());
        }
        let LogShape { segment_blocks, part_blocks } = self.shape;
        if !(2..=MAX_SEGMENT_BLOCKS).contains(&segment_blocks)
            || !(2..=MAX_PART_BLOCKS).contains(&part_blocks)
        {
            return spec(format!(
                "segments of {segment_blocks} blocks in parts of {part_blocks}: \
                 the most are {MAX_SEGMENT_BLOCKS} in parts of {MAX_PART_BLOCKS}, the least 2"
            ));
        }
        let (ram, overflow) =
            (bytes_in_words(self.ram_limit_bytes), bytes_in_words(self.overflow_limit_bytes));
        if self.mode.has_ram() && self.ram_limit_bytes < 16 * BLOCK_BYTES as u64 {
            return spec(format!("RAM limit {ram} is too small: the least is 64 KiB"));
        }
        if self.mode.has_ram() && self.ram_limit_bytes > MAX_DISK_BYTES {
            return spec(format!("RAM limit {ram} is more than 4 TiB"));
        }
        if self.mode.has_log() {
            let least = MIN_SEGMENTS * self.segment_bytes();
            if self.overflow_limit_bytes < least {
                return spec(format!(
                    "overflow limit {overflow} is too small: the least is {}",
                    bytes_in_words(least)
                ));
            }
            if self.overflow_limit_bytes > MAX_DISK_BYTES {
                return spec(format!("overflow limit {overflow} is more than 4 TiB"));
            }
            if self.overflow_limit_bytes / self.segment_bytes() > MAX_SEGMENTS {
                return spec(format!(
                    "overflow limit {overflow} is more than {MAX_SEGMENTS} segments of {segment_blocks} blocks"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both limits have the bound that catalogs have (`spillway_api::bounds`).
    #[test]
    fn limits_are_at_most_as_large_as_the_largest_disk() {
        let of = |ram_limit_bytes, overflow_limit_bytes| DiskSpec {
            size_bytes: 1 << 20,
            base_bytes: 0,
            mode: Mode::RamOverflow,
            full: FullPolicy::Pause,
            ram_limit_bytes,
            overflow_limit_bytes,
            shape: LogShape::default(),
        };
        of(4 << 40, 4 << 40).check().unwrap();
        for more in [of((4 << 40) + 1, 4 << 40), of(4 << 40, (4 << 40) + 1)] {
            let error = more.check().unwrap_err().to_string();
            assert!(error.contains("is more than 4 TiB"), "{error}");
        }
    }
}
