// All blocks of a decoder for few rows, and its last norm, in one call from Python.
//
// The functions of the other libraries compute each part, as if Python had called them one after
// the other: results are equal bit for bit. whole_blocks.py describes what is here: structures and
// functions of Python's have the same fields and arguments.

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"

namespace {

using Attention = Step<char, char, false>;  // of any type: it is only passed on

typedef void Normalize(const void* x, int64_t x_stride, const void* residual,
                       int64_t residual_stride, const void* weight, void* out, void* total,
                       int64_t rows, int64_t size, float eps, int64_t threads);
typedef void Multiply(const void* weight, const void* x, int64_t stride, const void* bias,
                      void* out, int64_t rows, int64_t threads);
typedef void Rotate(const void* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                    int64_t rope_stride, const void* q_weight, const void* k_weight, float eps,
                    void* q, void* k, void* k_cache, void* v_cache, const int64_t* slots,
                    int64_t rows, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                    int64_t half, int64_t threads);
typedef void RotateToCodes(const void* qkv, int64_t qkv_stride, const float* cos,
                           const float* sin, int64_t rope_stride, const void* q_weight,
                           const void* k_weight, float eps, void* q, void* k, void* v,
                           void* k_cache, void* v_cache, void* k_scales, void* v_scales,
                           float k_fixed, float v_fixed, int64_t block_size, const int64_t* slots,
                           int64_t rows, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                           int64_t half, int64_t threads);
typedef void Attend(const Attention& step);
typedef void Gate(const void* x, int64_t stride, void* out, int64_t rows, int64_t size,
                  int64_t threads);

struct Norm {
    Normalize* normalize;  // null: there is no norm
    const void* weight;
    float eps;
};

// A matrix, and the function that multiplies by it.
struct Product {
    Multiply* multiply;
    const void *weight, *bias;
    int64_t outputs;
};

// A linear layer: its outputs are those of its products, one after the other.
struct Linear {
    const Product* products;
    int64_t count, outputs;
};

struct WholeBlock {
    Norm before_mixer, after_mixer, before_feed_forward, after_feed_forward;
    Linear qkv, project, gate_up, down;
    void* rotate;  // a `Rotate`, or with scales of keys a `RotateToCodes`
    const void *q_norm, *k_norm;
    Attend* attend;
    Gate* gate;
    void *k_cache, *v_cache, *k_scales, *v_scales;
    const float* sinks;
    float head_eps, k_fixed, v_fixed, scale, soft_cap;
    int64_t rope, context;  // which of the step's
};

// The cosines and sines of a step's rows; without them nothing is rotated.
struct Rope {
    const float *cos, *sin;
    int64_t stride, half;
};

// What layers with the same cache group and window share: `attention` without what is a layer's.
struct GroupContext {
    Attention attention;
    const int64_t* slots;
};

struct WholeStep {
    const WholeBlock* blocks;
    Norm last;
    const Rope* ropes;
    const GroupContext* contexts;
    const char* x;  // [rows, hidden]
    char* out;      // [rows, hidden]
    int64_t count, rows, hidden, item, threads;  // an element has `item` bytes
};

// The memory between the parts of a block, for the largest of them.
class Scratch {
public:
    explicit Scratch(const WholeStep& s) {
        int64_t of_heads = 0, of_qkv = 0, of_gates = 0;
        for (int64_t i = 0; i < s.count; i++) {
            const WholeBlock& block = s.blocks[i];
            const Attention& attention = s.contexts[block.context].attention;
            of_heads = std::max(of_heads, attention.q_heads * attention.head_dim);
            of_qkv = std::max(of_qkv, block.qkv.outputs);
            of_gates = std::max(of_gates, block.gate_up.outputs);
        }
        const int64_t of_part = std::max({of_qkv, of_gates, s.hidden});
        char** const places[] = {&normed, &added, totals, totals + 1, &qkv, &q,
                                 &k, &v, &attended, &gates, &gated, &part};
        const int64_t sizes[] = {s.hidden, s.hidden, s.hidden, s.hidden, of_qkv, of_heads,
                                 of_heads, of_heads, of_heads, of_gates, of_gates / 2, of_part};
        thread_local std::vector<char> memory;  // kept for the next call
        int64_t offsets[12], end = 0;
        for (int i = 0; i < 12; i++) {
            offsets[i] = end;
            end += (s.rows * sizes[i] * s.item / CACHE_LINE + 1) * CACHE_LINE;
        }
        if (int64_t(memory.size()) < end + CACHE_LINE) memory.resize(end + CACHE_LINE);
        char* const start = memory.data() + CACHE_LINE - int64_t(memory.data()) % CACHE_LINE;
        for (int i = 0; i < 12; i++) *places[i] = start + offsets[i];
    }

    char *normed, *added, *totals[2], *qkv, *q, *k, *v, *attended, *gates, *gated, *part;
};

class Run {
public:
    explicit Run(const WholeStep& step) : s(step), at(step), residual(step.x) {}

    void run() {
        for (int64_t i = 0; i < s.count; i++) add_block(s.blocks[i]);
        add(s.last, s.out);
    }

private:
    void add_block(const WholeBlock& block) {
        add(block.before_mixer, at.normed);
        multiply(block.qkv, at.normed, s.hidden, at.qkv);
        const Attention step = attention_of(block);
        store(block, step);
        block.attend(step);
        multiply(block.project, at.attended, step.q_heads * step.head_dim, at.added);
        finish(block.after_mixer);
        add(block.before_feed_forward, at.normed);
        multiply(block.gate_up, at.normed, s.hidden, at.gates);
        const int64_t size = block.gate_up.outputs / 2;
        block.gate(at.gates, 2 * size, at.gated, s.rows, size, s.threads);
        multiply(block.down, at.gated, size, at.added);
        finish(block.after_feed_forward);
    }

    // Add the outputs of the part before, if there is one, to the residual; normalize the sum.
    void add(const Norm& norm, char* out) {
        char* const total = residual == at.totals[0] ? at.totals[1] : at.totals[0];
        if (has_part)
            norm.normalize(at.added, s.hidden, residual, s.hidden, norm.weight, out, total, s.rows,
                           s.hidden, norm.eps, s.threads);
        else
            norm.normalize(residual, s.hidden, nullptr, 0, norm.weight, out, nullptr, s.rows,
                           s.hidden, norm.eps, s.threads);
        if (has_part) residual = total;
        has_part = false;
    }

    // Normalize a part's outputs, if the block has a norm after this part.
    void finish(const Norm& norm) {
        has_part = true;
        if (!norm.normalize) return;
        norm.normalize(at.added, s.hidden, nullptr, 0, norm.weight, at.normed, nullptr, s.rows,
                       s.hidden, norm.eps, s.threads);
        std::swap(at.added, at.normed);
    }

    void multiply(const Linear& linear, const char* x, int64_t stride, char* out) {
        const int64_t row_bytes = linear.outputs * s.item;
        for (int64_t i = 0; i < linear.count; i++) {
            const Product& product = linear.products[i];
            const int64_t bytes = product.outputs * s.item;
            const bool is_whole = linear.count == 1 || s.rows == 1;
            char* const to = is_whole ? out : at.part;
            product.multiply(product.weight, x, stride, product.bias, to, s.rows, s.threads);
            for (int64_t row = 0; !is_whole && row < s.rows; row++)
                std::memcpy(out + row * row_bytes, to + row * bytes, bytes);
            out += bytes;
        }
    }

    Attention attention_of(const WholeBlock& block) const {
        Attention step = s.contexts[block.context].attention;
        step.q = at.q, step.k = (const char*)block.k_cache, step.v = (const char*)block.v_cache;
        step.k_scales = (const bf16*)block.k_scales, step.v_scales = (const bf16*)block.v_scales;
        step.out = at.attended, step.sinks = block.sinks;
        step.scale = block.scale, step.soft_cap = block.soft_cap;
        return step;
    }

    void store(const WholeBlock& block, const Attention& step) const {
        const Rope& rope = s.ropes[block.rope];
        const int64_t* slots = s.contexts[block.context].slots;
        if (block.k_scales)
            ((RotateToCodes*)block.rotate)(
                at.qkv, block.qkv.outputs, rope.cos, rope.sin, rope.stride, block.q_norm,
                block.k_norm, block.head_eps, at.q, at.k, at.v, block.k_cache, block.v_cache,
                block.k_scales, block.v_scales, block.k_fixed, block.v_fixed, step.block_size,
                slots, s.rows, step.q_heads, step.kv_heads, step.head_dim, rope.half, s.threads);
        else
            ((Rotate*)block.rotate)(
                at.qkv, block.qkv.outputs, rope.cos, rope.sin, rope.stride, block.q_norm,
                block.k_norm, block.head_eps, at.q, at.k, block.k_cache, block.v_cache, slots,
                s.rows, step.q_heads, step.kv_heads, step.head_dim, rope.half, s.threads);
    }

    const WholeStep& s;
    Scratch at;
    const char* residual;
    bool has_part = false;  // whether `at.added` has outputs that are not added yet
};

void whole_blocks(const WholeStep* step) { Run(*step).run(); }

}  // namespace

extern "C" {
void* whole_blocks_any = (void*)&whole_blocks;
}
