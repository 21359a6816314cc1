/* Runs the compiled core against a plain float64 reference, without Python: for processors that tests can only emulate.
 *
 * Usage: selftest [variant]. Prints the variant and the largest error; exits with 1 if that is too large.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef void (*tinkex_team)(void (*run)(void *context), void *context, unsigned num_threads, unsigned flags);

const void *tinkex_core_variant(const char *name);
const char *tinkex_core_name(const void *variant);
int tinkex_core_forward(const void *variant, const tinkex_model *model, const tinkex_pass *pass, int num_threads);
int tinkex_core_head(const void *variant, const tinkex_model *model, const tinkex_head *head, int num_threads);
int tinkex_core_draw(const void *variant, const tinkex_draw *draw, int num_threads);
int64_t tinkex_core_packed_bytes(const void *variant, int64_t format, int64_t outputs, int64_t inputs);
int tinkex_core_pack(const void *variant, const float *from, int64_t outputs, int64_t inputs, int64_t format, void *to,
                     int num_threads);
int tinkex_core_lora(const void *variant, const tinkex_lora_pass *pass, int backward, tinkex_team team,
                     int num_threads);

enum { LAYERS = 2, HIDDEN = 96, INNER = 100, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 12, VOCAB = 150, RANK = 5 };
enum { Q_SIZE = HEADS * HEAD_DIM, KV_SIZE = KV_HEADS * HEAD_DIM, SEQUENCES = 3, ROWS = 9 + 7 + 70, THREADS = 2 };
static const int64_t LENGTHS[SEQUENCES] = {9, 7, 70};
static const int64_t INPUTS[PROJ_PER_LAYER] = {HIDDEN, HIDDEN, HIDDEN, Q_SIZE, HIDDEN, HIDDEN, INNER};
static const int64_t OUTPUTS[PROJ_PER_LAYER] = {Q_SIZE, KV_SIZE, KV_SIZE, HIDDEN, INNER, INNER, HIDDEN};
static const double SCALE = 1.5, EPS = 1e-5;

static const void *variant;
static double worst;

static void check(const char *what, double found, double expected) {
    const double error = fabs(found - expected) / (1 + fabs(expected));
    if (!(error <= 2e-5)) {
        printf("%s: found %.9g, expected %.9g\n", what, found, expected);
        exit(1);
    }
    if (error > worst) worst = error;
}

static void must(int ok, const char *what) {
    if (!ok) {
        printf("%s failed\n", what);
        exit(1);
    }
}

/* Uniform in [0, 1), the same on every machine. */
static double uniform(void) {
    static uint64_t state = 42;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-53;
}

static float *random_floats(int64_t count, double size) {
    float *values = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) values[i] = (float)((2 * uniform() - 1) * size);
    return values;
}

static void *packed(const float *matrix, int64_t outputs, int64_t inputs, int64_t format) {
    const int64_t bytes = tinkex_core_packed_bytes(variant, format, outputs, inputs);
    must(bytes > 0, "packed_bytes");
    void *to = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    must(tinkex_core_pack(variant, matrix, outputs, inputs, format, to, THREADS) == TINKEX_OK, "pack");
    return to;
}

/* ---- The reference. */

/* out = x · Wᵀ + bias + scale · (x · Aᵀ) · Bᵀ. */
static void project(const double *x, const float *weight, const float *bias, const tinkex_lora *lora, int64_t outputs,
                    int64_t inputs, double *out) {
    for (int64_t o = 0; o < outputs; o++) {
        out[o] = bias == NULL ? 0 : bias[o];
        for (int64_t i = 0; i < inputs; i++) out[o] += x[i] * weight[o * inputs + i];
    }
    if (lora == NULL || lora->a == NULL) return;
    for (int64_t r = 0; r < RANK; r++) {
        double shrunk = 0;
        for (int64_t i = 0; i < inputs; i++) shrunk += x[i] * lora->a[r * inputs + i];
        for (int64_t o = 0; o < outputs; o++) out[o] += SCALE * shrunk * lora->b[o * RANK + r];
    }
}

static void norm(const double *x, const float *weight, int64_t size, double *out) {
    double squares = 0;
    for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
    const double scale = 1 / sqrt(squares / (double)size + EPS);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

static void rotate(double *head, const float *cosines, const float *sines) {
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        const double a = head[i], b = head[i + HEAD_DIM / 2];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + HEAD_DIM / 2] = b * cosines[i] + a * sines[i];
    }
}

/* The attention of one row over the keys and values of its sequence up to `row`. */
static void attend(const double *query, double (*keys)[KV_SIZE], double (*values)[KV_SIZE], int64_t row, int64_t window,
                   double *out) {
    const int64_t first = window > 0 && row >= window ? row - window + 1 : 0;
    for (int h = 0; h < HEADS; h++) {
        const int64_t kv = h / (HEADS / KV_HEADS) * HEAD_DIM;
        double weights[ROWS], total = 0;
        for (int64_t t = first; t <= row; t++) {
            double score = 0;
            for (int i = 0; i < HEAD_DIM; i++) score += query[h * HEAD_DIM + i] * keys[t][kv + i];
            total += weights[t] = exp(score / sqrt(HEAD_DIM));
        }
        for (int i = 0; i < HEAD_DIM; i++) {
            out[h * HEAD_DIM + i] = 0;
            for (int64_t t = first; t <= row; t++) out[h * HEAD_DIM + i] += weights[t] / total * values[t][kv + i];
        }
    }
}

static void reference_layer(const tinkex_layer *layer, const tinkex_lora *loras, int64_t num_rows, const float *cosines,
                            const float *sines, double (*x)[HIDDEN]) {
    static double keys[ROWS][KV_SIZE], values[ROWS][KV_SIZE];
#define PROJECT(p, from, to)                                                                                     \
    project(from, layer->weights[p].data, layer->biases[p], loras == NULL ? NULL : &loras[p], OUTPUTS[p], INPUTS[p], \
            to)
    for (int64_t row = 0; row < num_rows; row++) {
        double normed[HIDDEN], query[Q_SIZE], attended[Q_SIZE], out[HIDDEN], gate[INNER], up[INNER];
        norm(x[row], layer->input_norm, HIDDEN, normed);
        PROJECT(PROJ_Q, normed, query);
        PROJECT(PROJ_K, normed, keys[row]);
        PROJECT(PROJ_V, normed, values[row]);
        for (int h = 0; h < HEADS + KV_HEADS; h++) {
            double *head = h < HEADS ? query + h * HEAD_DIM : keys[row] + (h - HEADS) * HEAD_DIM;
            norm(head, h < HEADS ? layer->q_norm : layer->k_norm, HEAD_DIM, head);
            rotate(head, cosines + row * HEAD_DIM / 2, sines + row * HEAD_DIM / 2);
        }
        attend(query, keys, values, row, layer->window, attended);
        PROJECT(PROJ_O, attended, out);
        for (int i = 0; i < HIDDEN; i++) x[row][i] += out[i];
        norm(x[row], layer->mlp_norm, HIDDEN, normed);
        PROJECT(PROJ_GATE, normed, gate);
        PROJECT(PROJ_UP, normed, up);
        for (int i = 0; i < INNER; i++) gate[i] *= up[i] / (1 + exp(-gate[i]));
        PROJECT(PROJ_DOWN, gate, out);
        for (int i = 0; i < HIDDEN; i++) x[row][i] += out[i];
    }
#undef PROJECT
}

/* ---- The checks. */

static tinkex_layer random_layer(int64_t window) {
    tinkex_layer layer = {.window = window};
    for (int p = 0; p < PROJ_PER_LAYER; p++)
        layer.weights[p] = (tinkex_matrix){random_floats(OUTPUTS[p] * INPUTS[p], 0.2), FORMAT_FP32};
    for (int p = PROJ_Q; p <= PROJ_V; p++) layer.biases[p] = random_floats(OUTPUTS[p], 0.1);
    layer.input_norm = random_floats(HIDDEN, 1);
    layer.mlp_norm = random_floats(HIDDEN, 1);
    layer.q_norm = random_floats(HEAD_DIM, 1);
    layer.k_norm = random_floats(HEAD_DIM, 1);
    return layer;
}

/* The first sequence has no adapter, the second one, the third the same one transposed. */
static void check_forward(void) {
    const tinkex_layer layers[LAYERS] = {random_layer(0), random_layer(5)};
    const tinkex_model model = {.num_layers = LAYERS, .hidden = HIDDEN, .inner = INNER, .heads = HEADS,
                                .kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .vocab = VOCAB, .norm_eps = EPS,
                                .embedding = random_floats(VOCAB * HIDDEN, 1), .final_norm = random_floats(HIDDEN, 1),
                                .unembedding = {random_floats(VOCAB * HIDDEN, 0.2), FORMAT_FP32}, .layers = layers};
    tinkex_lora plain[LAYERS * PROJ_PER_LAYER + 1] = {0}, transposed[LAYERS * PROJ_PER_LAYER + 1] = {0};
    for (int p = 0; p <= LAYERS * PROJ_PER_LAYER; p++) {
        const int head = p == LAYERS * PROJ_PER_LAYER;
        const int64_t inputs = head ? HIDDEN : INPUTS[p % PROJ_PER_LAYER];
        const int64_t outputs = head ? VOCAB : OUTPUTS[p % PROJ_PER_LAYER];
        if (p == PROJ_V) continue; /* an adapter does not have to reach every projection */
        plain[p].a = random_floats(RANK * inputs, 0.2);
        plain[p].b = random_floats(outputs * RANK, 0.2);
        transposed[p] = (tinkex_lora){packed(plain[p].a, RANK, inputs, FORMAT_TRANSPOSED),
                                      packed(plain[p].b, outputs, RANK, FORMAT_TRANSPOSED), 1};
    }
    int32_t tokens[ROWS];
    float cosines[ROWS * HEAD_DIM / 2], sines[ROWS * HEAD_DIM / 2];
    tinkex_sequence sequences[SEQUENCES];
    tinkex_extent extents[SEQUENCES];
    tinkex_segment segments[SEQUENCES];
    for (int64_t s = 0, row = 0; s < SEQUENCES; row += LENGTHS[s++]) {
        const int64_t head_stride = LENGTHS[s] * HEAD_DIM, value_offset = KV_HEADS * head_stride;
        extents[s] = (tinkex_extent){random_floats(LAYERS * 2 * value_offset, 1), 0, 2 * value_offset, value_offset,
                                     head_stride};
        sequences[s] = (tinkex_sequence){row, LENGTHS[s], 0, &extents[s], 1};
        segments[s] = (tinkex_segment){row, LENGTHS[s], RANK, SCALE, s == 0 ? NULL : s == 1 ? plain : transposed};
        for (int64_t t = 0; t < LENGTHS[s]; t++) {
            tokens[row + t] = (int32_t)(uniform() * VOCAB);
            for (int i = 0; i < HEAD_DIM / 2; i++) {
                const double angle = (double)t / pow(100, 2.0 * i / HEAD_DIM);
                cosines[(row + t) * HEAD_DIM / 2 + i] = (float)cos(angle);
                sines[(row + t) * HEAD_DIM / 2 + i] = (float)sin(angle);
            }
        }
    }
    static float hidden[ROWS * HIDDEN], logits[ROWS * VOCAB];
    const tinkex_pass pass = {ROWS, SEQUENCES, SEQUENCES, tokens, cosines, sines, sequences, segments, hidden};
    must(tinkex_core_forward(variant, &model, &pass, THREADS) == TINKEX_OK, "forward");
    const tinkex_head head = {ROWS, SEQUENCES, hidden, segments, logits};
    must(tinkex_core_head(variant, &model, &head, THREADS) == TINKEX_OK, "head");

    for (int64_t s = 0, first = 0; s < SEQUENCES; first += LENGTHS[s++]) {
        static double x[ROWS][HIDDEN];
        const tinkex_lora *loras = s == 0 ? NULL : plain;
        for (int64_t t = 0; t < LENGTHS[s]; t++)
            for (int i = 0; i < HIDDEN; i++) x[t][i] = model.embedding[tokens[first + t] * HIDDEN + i];
        for (int l = 0; l < LAYERS; l++)
            reference_layer(&layers[l], loras == NULL ? NULL : loras + l * PROJ_PER_LAYER, LENGTHS[s],
                            cosines + first * HEAD_DIM / 2, sines + first * HEAD_DIM / 2, x);
        for (int64_t t = 0; t < LENGTHS[s]; t++) {
            double normed[HIDDEN], expected[VOCAB];
            norm(x[t], model.final_norm, HIDDEN, normed);
            for (int i = 0; i < HIDDEN; i++) check("hidden", hidden[(first + t) * HIDDEN + i], normed[i]);
            project(normed, model.unembedding.data, NULL,
                    loras == NULL ? NULL : &loras[LAYERS * PROJ_PER_LAYER], VOCAB, HIDDEN, expected);
            for (int v = 0; v < VOCAB; v++) check("logit", logits[(first + t) * VOCAB + v], expected[v]);
        }
    }
}

/* Weights that a format represents exactly: blocks of 32 share a scale that is a power of two. */
static float *exact_weights(int64_t format) {
    float *values = malloc(VOCAB * HIDDEN * sizeof(float));
    for (int64_t i = 0; i < VOCAB * HIDDEN; i++) {
        const int levels = format == FORMAT_Q4 ? 15 : 127;
        const int low = format == FORMAT_Q4 ? 7 : 63;
        const float scale = (i / 32) % 3 == 0 ? 0x1p-5f : 0x1p-7f;
        values[i] = (float)((int)(uniform() * (levels + 1)) - low) * scale;
        if (format == FORMAT_Q4 && i % 32 < 2) values[i] = (float)(i % 32 ? 8 : -7) * scale;
        if (format == FORMAT_Q8 && i % 32 == 0) values[i] = 127 * scale;
    }
    return values;
}

static void check_formats(void) {
    static const int64_t formats[] = {FORMAT_FP32, FORMAT_FP16, FORMAT_BF16, FORMAT_Q8, FORMAT_Q4};
    for (int f = 0; f < 5; f++)
        for (int64_t rows = 1; rows <= 9; rows++) {
            const float *weights = exact_weights(formats[f]), *hidden = random_floats(rows * HIDDEN, 1);
            const void *data = formats[f] == FORMAT_FP32 ? weights : packed(weights, VOCAB, HIDDEN, formats[f]);
            const tinkex_model model = {.hidden = HIDDEN, .vocab = VOCAB, .unembedding = {data, formats[f]}};
            static float logits[9 * VOCAB];
            const tinkex_head head = {rows, 0, hidden, NULL, logits};
            must(tinkex_core_head(variant, &model, &head, THREADS) == TINKEX_OK, "head");
            for (int64_t row = 0; row < rows; row++) {
                double x[HIDDEN], expected[VOCAB];
                for (int i = 0; i < HIDDEN; i++) x[i] = hidden[row * HIDDEN + i];
                project(x, weights, NULL, NULL, VOCAB, HIDDEN, expected);
                for (int v = 0; v < VOCAB; v++) check("packed product", logits[row * VOCAB + v], expected[v]);
            }
        }
    const float inexact[32] = {0.1f, 0.2f, 0.37f};
    char room[4096];
    must(tinkex_core_pack(variant, inexact, 1, 32, FORMAT_Q8, room, 1) == TINKEX_NOT_EXACT, "rejecting a matrix");
}

static void check_draw(void) {
    enum { DRAWS = 4 };
    float *logits = random_floats(DRAWS * VOCAB, 4);
    const float temperatures[DRAWS] = {0, 1, 0.5f, 1};
    const int64_t top_ks[DRAWS] = {-1, -1, 1, -1};
    const double top_ps[DRAWS] = {1, 1, 1, 1e-6}, uniforms[DRAWS] = {0.3, 0.3, 0.9, 0.9};
    int64_t tokens[DRAWS];
    float logprobs[DRAWS], normalizers[DRAWS];
    const tinkex_draw draw = {DRAWS, VOCAB, logits, temperatures, top_ks, top_ps, uniforms, tokens, logprobs,
                              normalizers};
    must(tinkex_core_draw(variant, &draw, THREADS) == TINKEX_OK, "draw");
    for (int row = 0; row < DRAWS; row++) {
        const double temperature = temperatures[row] == 0 ? 1 : temperatures[row];
        const float *own = logits + row * VOCAB;
        int64_t best = 0, drawn = 0;
        double total = 0, before = 0;
        for (int v = 0; v < VOCAB; v++) best = own[v] > own[best] ? v : best;
        for (int v = 0; v < VOCAB; v++) total += exp((own[v] - own[best]) / temperature);
        for (; drawn < VOCAB; drawn++) {
            before += exp((own[drawn] - own[best]) / temperature);
            if (before > uniforms[row] * total) break;
        }
        must(tokens[row] == (row == 1 ? drawn : best), "the drawn token");
        check("logprob", logprobs[row], (own[tokens[row]] - own[best]) / temperature - log(total));
    }
}

static void serially(void (*run)(void *context), void *context, unsigned num_threads, unsigned flags) {
    (void)flags;
    for (unsigned i = 0; i < num_threads; i++) run(context);
}

/* One part of two tenants: out += scale · x · Aᵀ · Bᵀ and its gradients. */
static void check_lora(void) {
    enum { TENANTS = 2, IN = 70, OUT = 90, N = 40 };
    static const int64_t first[TENANTS] = {0, 23}, count[TENANTS] = {23, 17};
    static float out[N * OUT], grad_x[N * IN], shrunk[N * RANK], shrunk_grad[N * RANK];
    static float grad_a[TENANTS][RANK * IN], grad_b[TENANTS][OUT * RANK];
    const float *x = random_floats(N * IN, 1), *grad_out = random_floats(N * OUT, 1);
    tinkex_tenant tenants[TENANTS] = {0};
    for (int t = 0; t < TENANTS; t++)
        tenants[t] = (tinkex_tenant){first[t], count[t], RANK, SCALE, {random_floats(RANK * IN, 0.3)},
                                     {random_floats(OUT * RANK, 0.3)}, {grad_a[t]}, {grad_b[t]}};
    const tinkex_lora_pass pass = {.inputs = IN, .num_parts = 1, .num_tenants = TENANTS, .max_rank = RANK,
                                   .outputs = {OUT}, .tenants = tenants, .x = x, .x_stride = IN, .shrunk = shrunk,
                                   .out = out, .out_stride = OUT, .grad_out = grad_out, .grad_out_stride = OUT,
                                   .shrunk_grad = shrunk_grad, .grad_x = grad_x, .grad_x_stride = IN};
    must(tinkex_core_lora(variant, &pass, 0, serially, THREADS) == TINKEX_OK, "LoRA forward");
    must(tinkex_core_lora(variant, &pass, 1, serially, THREADS) == TINKEX_OK, "LoRA backward");
    for (int t = 0; t < TENANTS; t++) {
        static double expected_a[RANK * IN], expected_b[OUT * RANK];
        const float *a = tenants[t].a[0], *b = tenants[t].b[0];
        memset(expected_a, 0, sizeof expected_a);
        memset(expected_b, 0, sizeof expected_b);
        for (int64_t row = first[t]; row < first[t] + count[t]; row++) {
            double u[RANK] = {0}, v[RANK] = {0};
            for (int r = 0; r < RANK; r++) {
                for (int i = 0; i < IN; i++) u[r] += SCALE * x[row * IN + i] * a[r * IN + i];
                for (int o = 0; o < OUT; o++) v[r] += SCALE * grad_out[row * OUT + o] * b[o * RANK + r];
                for (int i = 0; i < IN; i++) expected_a[r * IN + i] += v[r] * x[row * IN + i];
                for (int o = 0; o < OUT; o++) expected_b[o * RANK + r] += grad_out[row * OUT + o] * u[r];
            }
            for (int o = 0; o < OUT; o++) {
                double sum = 0;
                for (int r = 0; r < RANK; r++) sum += u[r] * b[o * RANK + r];
                check("LoRA output", out[row * OUT + o], sum);
            }
            for (int i = 0; i < IN; i++) {
                double sum = 0;
                for (int r = 0; r < RANK; r++) sum += v[r] * a[r * IN + i];
                check("gradient of the input", grad_x[row * IN + i], sum);
            }
        }
        for (int i = 0; i < RANK * IN; i++) check("gradient of A", grad_a[t][i], expected_a[i]);
        for (int i = 0; i < OUT * RANK; i++) check("gradient of B", grad_b[t][i], expected_b[i]);
    }
}

int main(int argc, char **argv) {
    variant = tinkex_core_variant(argc > 1 ? argv[1] : "");
    must(variant != NULL, "finding the variant");
    check_forward();
    check_formats();
    check_draw();
    check_lora();
    printf("%s %.1e\n", tinkex_core_name(variant), worst);
    return 0;
}
