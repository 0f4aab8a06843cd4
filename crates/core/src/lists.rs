//! Doubly linked lists of numbered nodes. To add or remove a node takes constant time, and no memory beside its links.
//!
//! A list is named by its head, which is a node too. Invariants: a node is on one list at most; a node on no list, and the head of
//! an empty list, is linked to itself.

/// The number of a node.
pub(crate) type Node = u32;

#[derive(Clone, Copy)]
struct Links {
    next: Node,
    previous: Node,
}

/// The links of all nodes.
pub(crate) struct Lists {
    links: Vec<Links>,
}

impl Lists {
    /// So many nodes, none on a list.
    pub fn new(nodes: u32) -> Lists {
        let mut lists = Lists { links: Vec::new() };
        lists.grow(nodes);
        lists
    }

    pub fn len(&self) -> u32 {
        self.links.len() as u32
    }

    /// Adds nodes until there are so many.
    pub fn grow(&mut self, nodes: u32) {
        self.links.extend((self.len()..nodes).map(|node| Links { next: node, previous: node }));
    }

    /// The node behind this one, or behind the head; the head follows the last.
    #[inline]
    pub fn next(&self, node: Node) -> Node {
        self.links[node as usize].next
    }

    /// Whether the list of this head is empty, or this node is on no list.
    #[inline]
    pub fn is_alone(&self, node: Node) -> bool {
        self.next(node) == node
    }

    /// Adds a node, which is on no list, behind this one: behind the head it becomes the first.
    #[inline]
    pub fn add_behind(&mut self, place: Node, node: Node) {
        debug_assert!(self.is_alone(node), "a node is on one list at most");
        let next = self.next(place);
        self.links[node as usize] = Links { next, previous: place };
        self.links[next as usize].previous = node;
        self.links[place as usize].next = node;
    }

    /// Adds a node, which is on no list, as the last.
    pub fn push_back(&mut self, head: Node, node: Node) {
        self.add_behind(self.links[head as usize].previous, node);
    }

    /// Takes a node off its list, if it is on one.
    #[inline]
    pub fn unlink(&mut self, node: Node) {
        let Links { next, previous } = self.links[node as usize];
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        self.links[node as usize] = Links { next: node, previous: node };
    }

    /// Moves all nodes of the list `from` behind those of the list `to`.
    pub fn append(&mut self, to: Node, from: Node) {
        if self.is_alone(from) {
            return;
        }
        // The head takes the place behind the last, and the other head leaves the circle.
        let (first, last) = (self.next(from), self.links[from as usize].previous);
        let before = self.links[to as usize].previous;
        self.links[before as usize].next = first;
        self.links[first as usize].previous = before;
        self.links[last as usize].next = to;
        self.links[to as usize].previous = last;
        self.links[from as usize] = Links { next: from, previous: from };
    }

    /// The nodes of a list, from the first.
    pub fn iter(&self, head: Node) -> impl Iterator<Item = Node> {
        std::iter::successors(Some(self.next(head)), |&node| Some(self.next(node)))
            .take_while(move |&node| node != head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_added_unlinked_and_moved_to_another_list() {
        let mut lists = Lists::new(2);
        lists.grow(8);
        let all = |lists: &Lists, head| lists.iter(head).collect::<Vec<_>>();
        (2..5).for_each(|node| lists.push_back(0, node));
        (5..8).for_each(|node| lists.add_behind(1, node));
        assert_eq!((all(&lists, 0), all(&lists, 1)), (vec![2, 3, 4], vec![7, 6, 5]));
        lists.unlink(3);
        lists.unlink(3);
        lists.append(0, 1);
        assert_eq!(all(&lists, 0), [2, 4, 7, 6, 5]);
        assert!(lists.is_alone(1) && lists.is_alone(3));
        lists.append(0, 1);
        lists.append(1, 0);
        assert_eq!(all(&lists, 1), [2, 4, 7, 6, 5]);
        assert!(lists.is_alone(0));
        (2..8).for_each(|node| lists.unlink(node));
        assert!((0..8).all(|node| lists.is_alone(node)));
    }
}
