// The suffix tree of ms_spec.proposers.suffix_tree, path-compressed: a node stands for a run of tokens with no branch
// and no suffix's end before its last one. Every count and order of children is that of the plain tree of single tokens.
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "children.h"
#include "pool.h"

namespace {

constexpr uint32_t ROOT = 0, NONE = 0;  // the root is nobody's child, so its number also means "no node"

struct Node {
    uint32_t count;                // suffixes that pass through it
    int32_t token;                 // the first of its run
    uint32_t text, at, length;     // the run: texts[text].tokens[at .. at + length)
    uint32_t parent, child, next;  // child: the first; next: sibling with the next lower count
    uint32_t prev;                 // of the first sibling: the last one
    uint32_t group;
};

// Siblings of equal count stand side by side.
struct Group {
    uint32_t first, last;
};

struct Text {
    int64_t sequence = 0;  // a later one began later
    int64_t uses = 0;      // nodes whose run stands here, and 1 until the sequence is removed
    std::vector<int32_t> tokens;
    std::vector<uint32_t> ends;  // nodes at which the suffixes end that still grow, the longest first
};

class Tree {
public:
    explicit Tree(int64_t depth) : depth_(depth) { nodes_[nodes_.add()] = Node{}; }

    int64_t nodes() const { return nodes_.size(); }
    int64_t texts() const { return int64_t(texts_.size()) - int64_t(free_texts_.size()); }

    void append(int64_t sequence, const int32_t* tokens, int64_t n) {
        if (n <= 0) return;
        const uint32_t id = text_of(sequence);
        Text& text = texts_[id];
        for (int64_t i = 0; i < n; ++i) {
            text.tokens.push_back(tokens[i]);
            if (int64_t(text.ends.size()) == depth_) text.ends.erase(text.ends.begin());
            text.ends.push_back(ROOT);
            for (uint32_t& end : text.ends) end = step(end, tokens[i], id, uint32_t(text.tokens.size() - 1));
        }
    }

    void remove(int64_t sequence) {
        const auto found = by_sequence_.find(sequence);
        if (found == by_sequence_.end()) return;
        const uint32_t id = found->second;
        const std::vector<int32_t>& tokens = texts_[id].tokens;
        const int64_t n = int64_t(tokens.size());
        for (int64_t begin = 0; begin < n; ++begin) forget(&tokens[begin], n - begin < depth_ ? n - begin : depth_);
        by_sequence_.erase(found);
        release(id);
    }

    // The likeliest run behind the end of `context`: see Tree.draft in suffix_tree.py.
    int64_t draft(const int32_t* context, int64_t n, int64_t limit, float factor, float min_prob, int32_t* out,
                  float* score) {
        best_.clear();
        *score = 0;
        for (int64_t matched = 1; matched < n; ++matched) {
            uint32_t node = ROOT, used = 0;
            if (!match(context + n - matched, matched, node, used)) break;
            const double wanted = double(float(matched) * factor) + 1e-6;
            const int64_t most = wanted >= double(limit) ? limit : int64_t(wanted);
            const float reached = follow(node, used, most, min_prob);
            if (reached < *score) continue;
            *score = reached;
            best_.swap(run_);
        }
        for (size_t i = 0; i < best_.size(); ++i) out[i] = best_[i];
        return int64_t(best_.size());
    }

private:
    const int64_t depth_;
    Pool<Node> nodes_;
    Pool<Group> groups_;
    Children children_;
    std::vector<Text> texts_;
    std::vector<uint32_t> free_texts_;
    std::unordered_map<int64_t, uint32_t> by_sequence_;
    std::vector<int32_t> best_, run_;

    // ---- walks

    int32_t token_of(const Node& node, uint32_t i) const { return texts_[node.text].tokens[node.at + i]; }

    uint32_t find(uint32_t parent, int32_t token) {
        const uint32_t first = nodes_[parent].child;
        if (!first || nodes_[first].token == token) return first;
        if (!nodes_[first].next) return NONE;
        return children_.find(Children::hash(parent, token), [&](uint32_t child) {
            return nodes_[child].parent == parent && nodes_[child].token == token;
        });
    }

    // Ends behind the first `used` tokens of `node`.
    bool match(const int32_t* tokens, int64_t n, uint32_t& node, uint32_t& used) {
        for (int64_t i = 0; i < n; ++i) {
            if (used < nodes_[node].length) {
                if (token_of(nodes_[node], used) != tokens[i]) return false;
                ++used;
            } else {
                node = find(node, tokens[i]);
                if (!node) return false;
                used = 1;
            }
        }
        return true;
    }

    // Puts the likeliest path from there into run_ and returns the sum of its probabilities.
    float follow(uint32_t node, uint32_t used, int64_t most, float min_prob) {
        float p = 1, sum = 0;
        run_.clear();
        while (int64_t(run_.size()) < most) {
            if (used < nodes_[node].length) {
                run_.push_back(token_of(nodes_[node], used++));
            } else {
                const uint32_t child = nodes_[node].child;
                if (!child) break;
                p *= float(nodes_[child].count) / float(nodes_[node].count);
                if (p < min_prob) break;
                run_.push_back(nodes_[child].token);
                node = child;
                used = 1;
            }
            sum += p;
        }
        return sum;
    }

    // ---- texts: a node's run stands in the text of the youngest sequence that passed all of it. So when the oldest
    // sequence is removed, as usual, no other node needs its text. If another one is removed, its text stays until its
    // nodes are gone, which is at the latest when the sequences are removed that were older than it.

    uint32_t text_of(int64_t sequence) {
        const auto found = by_sequence_.find(sequence);
        if (found != by_sequence_.end()) return found->second;
        uint32_t id = uint32_t(texts_.size());
        if (free_texts_.empty()) {
            texts_.emplace_back();
        } else {
            id = free_texts_.back();
            free_texts_.pop_back();
        }
        texts_[id].sequence = sequence;
        texts_[id].uses = 1;
        by_sequence_[sequence] = id;
        return id;
    }

    void release(uint32_t id) {
        if (--texts_[id].uses) return;
        texts_[id] = Text{};
        free_texts_.push_back(id);
    }

    void move_run(uint32_t node, uint32_t text, uint32_t at) {
        Node& n = nodes_[node];
        ++texts_[text].uses;
        release(n.text);
        n.text = text;
        n.at = at;
    }

    // `text` has passed the node too, its run at `at`.
    void passed(uint32_t node, uint32_t text, uint32_t at) {
        if (texts_[text].sequence > texts_[nodes_[node].text].sequence) move_run(node, text, at);
    }

    // ---- growth

    // A suffix that ends at `end` grows by the token at `pos` of `text`. Returns where it ends now.
    uint32_t step(uint32_t end, int32_t token, uint32_t text, uint32_t pos) {
        const uint32_t child = find(end, token);
        if (!child) {
            if (end != ROOT && nodes_[end].count == 1) {  // a leaf of this suffix alone
                move_run(end, text, pos - nodes_[end].length);
                ++nodes_[end].length;
                return end;
            }
            return add_leaf(end, token, text, pos);
        }
        // Nothing but this suffix's end keeps the two nodes apart.
        const bool alone = end != ROOT && nodes_[end].child == child && !nodes_[child].next &&
                           nodes_[end].count == nodes_[child].count + 1;
        if (nodes_[child].length == 1) {
            increment(child);
            passed(child, text, pos);
            if (alone) absorb(end);
            return child;
        }
        if (alone) {
            lengthen(end, child, text, pos);
            return end;
        }
        const uint32_t upper = split(child);
        increment(upper);
        passed(upper, text, pos);
        return upper;
    }

    uint32_t add_leaf(uint32_t parent, int32_t token, uint32_t text, uint32_t pos) {
        const uint32_t leaf = nodes_.add(), first = nodes_[parent].child;
        nodes_[leaf] = Node{1, token, text, pos, 1, parent, NONE, NONE, leaf, 0};
        ++texts_[text].uses;
        if (!first) {
            nodes_[parent].child = leaf;
            found_group(leaf);
        } else {
            const uint32_t last = nodes_[first].prev;
            insert_after(leaf, last);
            if (nodes_[last].count == 1)
                join_as_last(leaf, nodes_[last].group);
            else
                found_group(leaf);
        }
        children_.insert(Children::hash(parent, token), leaf);
        return leaf;
    }

    // The first token of an only child becomes the last one of `end`.
    void lengthen(uint32_t end, uint32_t child, uint32_t text, uint32_t pos) {
        Node &e = nodes_[end], &c = nodes_[child];
        move_run(end, c.text, c.at - e.length);
        passed(end, text, pos - e.length);
        ++e.length;
        children_.erase(Children::hash(end, c.token), child);
        shorten(child, end);
    }

    // Gives the first token of a run its own node, which takes the place of the old one.
    uint32_t split(uint32_t lower) {
        const uint32_t upper = nodes_.add();
        Node &u = nodes_[upper], &l = nodes_[lower];
        u = l;
        u.length = 1;
        u.child = lower;
        ++texts_[u.text].uses;
        children_.rename(Children::hash(u.parent, u.token), lower, upper);
        take_place(upper, lower);
        l.next = NONE;
        l.prev = lower;
        found_group(lower);
        shorten(lower, upper);
        return upper;
    }

    void shorten(uint32_t node, uint32_t parent) {
        Node& n = nodes_[node];
        ++n.at;
        --n.length;
        n.token = token_of(n, 0);
        n.parent = parent;
        children_.insert(Children::hash(parent, n.token), node);
    }

    // Joins a node to its only child, which has the same count and keeps its number.
    void absorb(uint32_t node) {
        const uint32_t child = nodes_[node].child;
        Node &n = nodes_[node], &c = nodes_[child];
        children_.erase(Children::hash(node, c.token), child);
        children_.rename(Children::hash(n.parent, n.token), node, child);
        groups_.drop(c.group);
        c.token = n.token;
        c.at -= n.length;
        c.length += n.length;
        c.parent = n.parent;
        c.prev = n.prev;
        c.next = n.next;
        c.group = n.group;
        take_place(child, node);
        release(n.text);
        nodes_.drop(node);
    }

    // ---- removal

    // One suffix less.
    void forget(const int32_t* tokens, int64_t n) {
        uint32_t node = ROOT;
        for (int64_t i = 0; i < n;) {
            const uint32_t child = find(node, tokens[i]);
            if (nodes_[child].count == 1) {
                drop_leaf(child);
                break;
            }
            decrement(child);
            i += nodes_[child].length;
            node = child;
        }
        const uint32_t child = nodes_[node].child;
        if (node != ROOT && child && !nodes_[child].next && nodes_[child].count == nodes_[node].count) absorb(node);
    }

    // What one suffix alone passes is one node.
    void drop_leaf(uint32_t leaf) {
        leave_group(leaf);
        unlink(leaf);
        children_.erase(Children::hash(nodes_[leaf].parent, nodes_[leaf].token), leaf);
        release(nodes_[leaf].text);
        nodes_.drop(leaf);
    }

    // ---- order of siblings

    // Becomes the last of the group above, but its first if it was the first of its own.
    void increment(uint32_t node) {
        Node& n = nodes_[node];
        const uint32_t first = groups_[n.group].first, last = groups_[n.group].last;
        const uint32_t left = nodes_[n.parent].child == first ? NONE : nodes_[first].prev;
        const bool above = left && nodes_[left].count == n.count + 1;
        ++n.count;
        if (!above && first == last) return;
        leave_group(node);
        if (node != first) {
            unlink(node);
            insert_before(node, first);
            if (above)
                join_as_last(node, nodes_[left].group);
            else
                found_group(node);
        } else if (above) {
            unlink(node);
            insert_before(node, groups_[nodes_[left].group].first);
            join_as_first(node, nodes_[left].group);
        } else {
            found_group(node);
        }
    }

    // Becomes the first of the group below.
    void decrement(uint32_t node) {
        Node& n = nodes_[node];
        const uint32_t first = groups_[n.group].first, last = groups_[n.group].last, right = nodes_[last].next;
        const bool below = right && nodes_[right].count == n.count - 1;
        --n.count;
        if (!below && first == last) return;
        leave_group(node);
        if (node != last) {
            unlink(node);
            insert_after(node, last);
        }
        if (below)
            join_as_first(node, nodes_[right].group);
        else
            found_group(node);
    }

    void found_group(uint32_t node) {
        nodes_[node].group = groups_.add();
        groups_[nodes_[node].group] = {node, node};
    }

    void join_as_first(uint32_t node, uint32_t group) {
        nodes_[node].group = group;
        groups_[group].first = node;
    }

    void join_as_last(uint32_t node, uint32_t group) {
        nodes_[node].group = group;
        groups_[group].last = node;
    }

    // Before it is unlinked.
    void leave_group(uint32_t node) {
        const Node& n = nodes_[node];
        Group& group = groups_[n.group];
        if (group.first == group.last)
            groups_.drop(n.group);
        else if (group.first == node)
            group.first = n.next;
        else if (group.last == node)
            group.last = n.prev;
    }

    void set_prev(uint32_t next, uint32_t parent, uint32_t prev) {
        nodes_[next ? next : nodes_[parent].child].prev = prev;
    }

    void unlink(uint32_t node) {
        const Node& n = nodes_[node];
        Node& parent = nodes_[n.parent];
        if (parent.child == node)
            parent.child = n.next;
        else
            nodes_[n.prev].next = n.next;
        if (parent.child) set_prev(n.next, n.parent, n.prev);
    }

    void insert_before(uint32_t node, uint32_t sibling) {
        Node &n = nodes_[node], &s = nodes_[sibling];
        n.next = sibling;
        n.prev = s.prev;
        if (nodes_[n.parent].child == sibling)
            nodes_[n.parent].child = node;
        else
            nodes_[n.prev].next = node;
        s.prev = node;
    }

    void insert_after(uint32_t node, uint32_t sibling) {
        Node &n = nodes_[node], &s = nodes_[sibling];
        n.prev = sibling;
        n.next = s.next;
        s.next = node;
        set_prev(n.next, n.parent, node);
    }

    // Whoever pointed at `old` among its siblings points at `node`, which has old's links already.
    void take_place(uint32_t node, uint32_t old) {
        Node& n = nodes_[node];
        if (nodes_[n.parent].child == old)
            nodes_[n.parent].child = node;
        else
            nodes_[n.prev].next = node;
        set_prev(n.next, n.parent, node);
        Group& group = groups_[n.group];
        if (group.first == old) group.first = node;
        if (group.last == old) group.last = node;
    }
};

}  // namespace

// -1: out of memory; the tree can then only be freed.
#define GUARDED(...)  \
    try {             \
        __VA_ARGS__;  \
    } catch (...) {   \
        return -1;    \
    }

extern "C" {

void* suffix_tree_new(int64_t depth) {
    try {
        return new Tree(depth);
    } catch (...) {
        return nullptr;
    }
}

void suffix_tree_free(void* tree) { delete static_cast<Tree*>(tree); }

int64_t suffix_tree_append(void* tree, int64_t sequence, const int32_t* tokens, int64_t n) {
    GUARDED(static_cast<Tree*>(tree)->append(sequence, tokens, n); return 0)
}

int64_t suffix_tree_remove(void* tree, int64_t sequence) {
    GUARDED(static_cast<Tree*>(tree)->remove(sequence); return 0)
}

int64_t suffix_tree_draft(void* tree, const int32_t* context, int64_t n, int64_t limit, float factor, float min_prob,
                          int32_t* out, float* score) {
    GUARDED(return static_cast<Tree*>(tree)->draft(context, n, limit, factor, min_prob, out, score))
}

int64_t suffix_tree_nodes(void* tree) { return static_cast<Tree*>(tree)->nodes(); }

int64_t suffix_tree_texts(void* tree) { return static_cast<Tree*>(tree)->texts(); }

}  // extern "C"
