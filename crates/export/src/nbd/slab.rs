//! A table whose entries have small numbers as indexes. Never moves an entry.
//!
//! Invariant: an index is valid from `insert` to `remove`, and may be used again after that.

/// Entries by index, with free indexes reused last-in first-out so that the hot ones stay in the cache.
pub struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

/// A table that has grown past this many entries is freed when it becomes empty.
const KEPT_ENTRIES: usize = 1024;

impl<T> Slab<T> {
    pub fn new() -> Self {
        Slab { entries: Vec::new(), free: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The callers bound the number of entries far below `u32::MAX`.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = Some(value);
            return index;
        }
        let index = u32::try_from(self.entries.len()).expect("entries are bounded by the held bytes");
        self.entries.push(Some(value));
        index
    }

    pub fn get(&self, index: u32) -> Option<&T> {
        self.entries.get(index as usize)?.as_ref()
    }

    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    pub fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.entries.get_mut(index as usize)?.take()?;
        self.free.push(index);
        if self.is_empty() && self.entries.len() > KEPT_ENTRIES {
            self.entries = Vec::new();
            self.free = Vec::new();
        }
        Some(value)
    }
}
