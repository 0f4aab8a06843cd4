//! Parts of lists that may be long: which part a request asks for, and the page that answers it. Owns the tokens that
//! continue a list.
//!
//! Invariant: a token names the last object of a page, so that the list goes on at that place whatever is made or removed
//! meanwhile; what a page takes of memory does not grow with the list.

use base64ct::{Base64UrlUnpadded, Encoding};
use spillway_api::Page;

/// The longest token that continues a list.
const MOST_TOKEN_BYTES: usize = 256;

/// Which part of a list is asked for.
#[derive(Clone, Debug)]
pub struct PageRequest {
    /// What comes after this name; all if it is empty.
    pub after: String,
    /// So many at most, one at least.
    pub most: usize,
}

/// The name of the last object on the page that gave this token; nothing if no page did.
pub fn name_of(token: &str) -> Option<String> {
    let name = (token.len() <= MOST_TOKEN_BYTES).then(|| Base64UrlUnpadded::decode_vec(token).ok()).flatten();
    let name = name.and_then(|name| String::from_utf8(name).ok());
    name.filter(|name| name.bytes().all(|b| b.is_ascii_graphic()))
}

/// The token that continues a list after the object of this name.
fn token_of(name: &str) -> String {
    Base64UrlUnpadded::encode_string(name.as_bytes())
}

/// Collects the objects of a page.
pub struct PageBuilder<T> {
    items: Vec<T>,
    most: usize,
    last: String,
    is_cut: bool,
}

impl<T> PageBuilder<T> {
    /// Starts with an empty page.
    pub fn new(part: &PageRequest) -> PageBuilder<T> {
        PageBuilder { items: Vec::new(), most: part.most, last: String::new(), is_cut: false }
    }

    /// Adds the object of this name. `false`: the page was full, and the list goes on after it.
    pub fn add(&mut self, name: &str, item: T) -> bool {
        self.is_cut = self.items.len() == self.most;
        if !self.is_cut {
            self.items.push(item);
            self.last = name.to_owned();
        }
        !self.is_cut
    }

    /// The page.
    pub fn page(self) -> Page<T> {
        let next = self.is_cut.then(|| token_of(&self.last));
        Page { items: self.items, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_cut_says_how_the_list_goes_on() {
        let mut page = PageBuilder::new(&PageRequest { after: String::new(), most: 2 });
        assert!(page.add("desk-1", 1) && page.add("desk-2", 2));
        let (full, mut cut) =
            (PageBuilder { items: page.items.clone(), last: page.last.clone(), ..page }, page);
        assert_eq!(full.page().next, None, "nothing comes after it");
        assert!(!cut.add("desk-3", 3));
        let page = cut.page();
        assert_eq!((page.items, page.next.as_deref().and_then(name_of)), (vec![1, 2], Some("desk-2".into())));
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let long = token_of(&"x".repeat(200));
        for token in ["desk-2", "Zm8=", "Zg+", "\u{e9}", &token_of("a\nb"), &token_of("\u{e9}"), &long] {
            assert_eq!(name_of(token), None, "{token}");
        }
        assert_eq!(name_of(&token_of("desk-001/6a9c0a1e")).as_deref(), Some("desk-001/6a9c0a1e"));
    }
}
