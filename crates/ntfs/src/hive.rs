//! Registry hives: keys and values in cells. Owns their layout
//! (<https://github.com/msuhanov/regf/blob/master/Windows%20registry%20file%20format%20specification.md>).
//!
//! Invariant: a search looks at a bounded number of cells, each of bounded length.

use crate::bytes::{latin1, part, u16_at, u32_at, utf16};
use crate::{ByteSource, NtfsError};

/// Size of the header, after which the cells are.
const HEADER_BYTES: u64 = 4096;
/// Number of keys below one key, and of values of one key, that are looked at.
const MOST_KEYS: usize = 1 << 16;
const MOST_VALUES: usize = 4096;
/// Sizes of a key and of a value without their names, and the longest name of a key, in bytes.
const KEY_BYTES: usize = 76;
const VALUE_BYTES: usize = 20;
const MOST_NAME_BYTES: usize = 512;
/// Size of the header of a list of keys.
const LIST_HEADER: usize = 4;
/// Largest value. A larger one is spread over several cells.
const MOST_VALUE_BYTES: usize = 16_344;
/// Bit of a value's size: the value is in place of its offset.
const INLINE: u32 = 1 << 31;
/// Flag of a key, and of a value: the name has one byte for each character.
const KEY_LATIN1: u16 = 0x0020;
const VALUE_LATIN1: u16 = 0x0001;
/// Types of values.
const SZ: u32 = 1;
const EXPAND_SZ: u32 = 2;
const DWORD: u32 = 4;
const MULTI_SZ: u32 = 7;

/// A registry hive.
pub struct Hive<S> {
    source: S,
    root: u32,
    /// End of the last cell, in bytes from the beginning of the source.
    end: u64,
    is_dirty: bool,
}

/// A key of a hive.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    keys: u32,
    keys_at: u32,
    values: u32,
    values_at: u32,
}

/// A value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    kind: u32,
    bytes: Vec<u8>,
}

impl Value {
    /// Returns the number of a `REG_DWORD`.
    pub fn number(&self) -> Option<u32> {
        let bytes: [u8; 4] = self.bytes.as_slice().try_into().ok()?;
        (self.kind == DWORD).then(|| u32::from_le_bytes(bytes))
    }

    /// Returns the text of a `REG_SZ` or `REG_EXPAND_SZ`.
    pub fn text(&self) -> Option<String> {
        matches!(self.kind, SZ | EXPAND_SZ).then(|| self.strings().into_iter().next().unwrap_or_default())
    }

    /// Returns the texts of a `REG_MULTI_SZ`. A single text counts as one.
    pub fn texts(&self) -> Option<Vec<String>> {
        let found = || self.strings().into_iter().filter(|text| !text.is_empty()).collect();
        matches!(self.kind, SZ | EXPAND_SZ | MULTI_SZ).then(found)
    }

    fn strings(&self) -> Vec<String> {
        utf16(&self.bytes).split('\0').map(str::to_owned).collect()
    }
}

impl<S: ByteSource> Hive<S> {
    /// Opens the hive that these bytes are.
    pub fn open(source: S) -> Result<Hive<S>, NtfsError> {
        let mut header = [0; 512];
        source.read_at(0, &mut header)?;
        // 1: a hive, not its log.
        if !header.starts_with(b"regf") || u32_at(&header, 20)? != 1 {
            return Err(NtfsError::Damaged("header"));
        }
        let end = (HEADER_BYTES + u64::from(u32_at(&header, 40)?)).min(source.len_bytes());
        let is_dirty = u32_at(&header, 4)? != u32_at(&header, 8)?;
        Ok(Hive { root: u32_at(&header, 36)?, source, end, is_dirty })
    }

    /// Whether the last change to the file was interrupted, or is only in the hive's log.
    pub fn is_dirty(&self) -> bool {
        self.is_dirty
    }

    /// Finds a key by its path, with `\` between the names. Letters may be in either case.
    pub fn key(&self, path: &str) -> Result<Option<Key>, NtfsError> {
        let (_, mut at) = self.read_key(self.root)?;
        for name in path.split('\\').filter(|name| !name.is_empty()) {
            match self.subkey(&at, name)? {
                Some(key) => at = key,
                None => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// Finds a value of a key by its name; the name of a default value is empty.
    pub fn value(&self, key: &Key, name: &str) -> Result<Option<Value>, NtfsError> {
        if key.values == 0 {
            return Ok(None);
        }
        let values = (key.values as usize).min(MOST_VALUES);
        let list = self.cell(key.values_at, values * 4)?;
        for n in 0..values {
            let cell = self.cell(u32_at(&list, n * 4)?, VALUE_BYTES + MOST_NAME_BYTES)?;
            if !cell.starts_with(b"vk") {
                return Err(NtfsError::Damaged("value"));
            }
            let name_bytes = usize::from(u16_at(&cell, 2)?);
            // Names of values may be longer than any that is looked for.
            if name_bytes > MOST_NAME_BYTES {
                continue;
            }
            let stored = part(&cell, VALUE_BYTES, name_bytes)?;
            let stored = if u16_at(&cell, 16)? & VALUE_LATIN1 != 0 { latin1(stored) } else { utf16(stored) };
            if stored.eq_ignore_ascii_case(name) {
                return self.read_value(&cell).map(Some);
            }
        }
        Ok(None)
    }

    fn read_value(&self, cell: &[u8]) -> Result<Value, NtfsError> {
        let (size, at, kind) = (u32_at(cell, 4)?, u32_at(cell, 8)?, u32_at(cell, 12)?);
        let len = (size & !INLINE) as usize;
        let bytes = if size & INLINE != 0 {
            part(&at.to_le_bytes(), 0, len)?.to_vec()
        } else if len == 0 {
            Vec::new()
        } else if len > MOST_VALUE_BYTES {
            return Err(NtfsError::Unsupported("a large value"));
        } else {
            part(&self.cell(at, len)?, 0, len)?.to_vec()
        };
        Ok(Value { kind, bytes })
    }

    fn subkey(&self, key: &Key, name: &str) -> Result<Option<Key>, NtfsError> {
        if key.keys == 0 {
            return Ok(None);
        }
        let (list, mut seen) = (self.list(key.keys_at)?, 0);
        // A list of lists; a list in it is not one again.
        if !list.starts_with(b"ri") {
            return self.listed(&list, name, &mut seen);
        }
        for at in list[LIST_HEADER..].chunks_exact(4) {
            let list = self.list(u32_at(at, 0)?)?;
            if let Some(found) = self.listed(&list, name, &mut seen)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Finds a key in a list, and counts those that it looked at.
    fn listed(&self, list: &[u8], name: &str, seen: &mut usize) -> Result<Option<Key>, NtfsError> {
        for item in list[LIST_HEADER..].chunks_exact(width(list)?) {
            *seen += 1;
            if *seen > MOST_KEYS {
                return Err(NtfsError::Damaged("list of keys"));
            }
            let (found, key) = self.read_key(u32_at(item, 0)?)?;
            if found.eq_ignore_ascii_case(name) {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }

    /// Reads a list of keys or of lists: a header, and as many items as that counts.
    fn list(&self, at: u32) -> Result<Vec<u8>, NtfsError> {
        let header = self.cell(at, LIST_HEADER)?;
        let width = if header.starts_with(b"ri") { 4 } else { width(&header)? };
        let len = LIST_HEADER + usize::from(u16_at(&header, 2)?) * width;
        let list = self.cell(at, len)?;
        part(&list, 0, len)?;
        Ok(list)
    }

    fn read_key(&self, at: u32) -> Result<(String, Key), NtfsError> {
        let cell = self.cell(at, KEY_BYTES + MOST_NAME_BYTES)?;
        if !cell.starts_with(b"nk") {
            return Err(NtfsError::Damaged("key"));
        }
        let name = part(&cell, KEY_BYTES, u16_at(&cell, 72)?.into())?;
        let name = if u16_at(&cell, 2)? & KEY_LATIN1 != 0 { latin1(name) } else { utf16(name) };
        let number = |at| u32_at(&cell, at);
        let key =
            Key { keys: number(20)?, keys_at: number(28)?, values: number(36)?, values_at: number(40)? };
        Ok((name, key))
    }

    /// Reads the beginning of a cell that is in use, at most this many bytes.
    fn cell(&self, at: u32, most: usize) -> Result<Vec<u8>, NtfsError> {
        let damaged = NtfsError::Damaged("list of cells");
        let at = HEADER_BYTES + u64::from(at);
        let mut size = [0; 4];
        if at.checked_add(4).is_none_or(|end| end > self.end) {
            return Err(damaged);
        }
        self.source.read_at(at, &mut size)?;
        // The size counts itself, and is negative while the cell is in use.
        let size = u64::from(
            i32::from_le_bytes(size)
                .checked_neg()
                .and_then(|size| u32::try_from(size).ok())
                .ok_or(damaged)?,
        );
        let len = size.checked_sub(4).ok_or(damaged)?;
        if at + size > self.end {
            return Err(damaged);
        }
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX).min(most)];
        self.source.read_at(at + 4, &mut bytes)?;
        Ok(bytes)
    }
}

/// Size of an item of a list of keys. Some forms have a part or a hash of the name after each offset.
fn width(list: &[u8]) -> Result<usize, NtfsError> {
    match part(list, 0, 2)? {
        b"li" => Ok(4),
        b"lf" | b"lh" => Ok(8),
        _ => Err(NtfsError::Damaged("list of keys")),
    }
}
