//! A small memory of equal pieces, the least recently used of which makes space. Owns the pieces; never loads one
//! by itself.
//!
//! Invariant: never more than `capacity` pieces, and a piece whose loading failed is not found again.

use std::io;

/// Recently used pieces by key.
pub struct Recent {
    pieces: Vec<Piece>,
    piece_bytes: usize,
    capacity: usize,
    clock: u64,
}

struct Piece {
    key: Option<u64>,
    used: u64,
    bytes: Box<[u8]>,
}

impl Recent {
    /// Room for `capacity` pieces (at least one) of `piece_bytes`, taken as they come.
    pub fn new(piece_bytes: usize, capacity: usize) -> Recent {
        Recent { pieces: Vec::new(), piece_bytes, capacity: capacity.max(1), clock: 0 }
    }

    /// The piece of this key; `load` fills one if there is none.
    pub fn get(&mut self, key: u64, load: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<&[u8]> {
        self.clock += 1;
        if let Some(found) = self.pieces.iter().position(|piece| piece.key == Some(key)) {
            self.pieces[found].used = self.clock;
            return Ok(&self.pieces[found].bytes);
        }
        let slot = if self.pieces.len() < self.capacity {
            self.pieces.push(Piece { key: None, used: 0, bytes: vec![0; self.piece_bytes].into() });
            self.pieces.len() - 1
        } else {
            let oldest = self.pieces.iter().enumerate().min_by_key(|(_, piece)| piece.used);
            oldest.map(|(slot, _)| slot).expect("the capacity is at least one, so there is a piece")
        };
        let piece = &mut self.pieces[slot];
        piece.key = None;
        load(&mut piece.bytes)?;
        piece.key = Some(key);
        piece.used = self.clock;
        Ok(&piece.bytes)
    }

    /// Forgets the content of all pieces.
    pub fn forget(&mut self) {
        for piece in &mut self.pieces {
            piece.key = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes_first_and_failures_are_not_kept() {
        let mut recent = Recent::new(8, 2);
        let fill = |value: u8| {
            move |bytes: &mut [u8]| {
                bytes.fill(value);
                Ok(())
            }
        };
        let absent = |_: &mut [u8]| -> io::Result<()> { Err(io::ErrorKind::NotFound.into()) };
        recent.get(1, fill(1)).unwrap();
        recent.get(2, fill(2)).unwrap();
        assert_eq!(recent.get(1, absent).unwrap(), [1; 8]);
        recent.get(3, fill(3)).unwrap();
        assert_eq!(recent.get(1, absent).unwrap(), [1; 8]);
        assert!(recent.get(2, absent).is_err());
        assert!(recent.get(2, absent).is_err());
        assert_eq!(recent.pieces.len(), 2);
    }
}
